"""Meshes of data, context, tensor and expert parallelism over any model.

Example:
    >>> from stratagem_mesh import MeshStrategy
    >>> MeshStrategy(tensor=2).tensor
    2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.lazy import lazy_names

if TYPE_CHECKING:
    from stratagem_mesh.expert.load import ExpertLoad as ExpertLoad
    from stratagem_mesh.strategy import MeshStrategy as MeshStrategy
    from stratagem_mesh.tensor.vocabulary import cross_entropy as cross_entropy
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
