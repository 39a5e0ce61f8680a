"""The modules and functions that the documentation names."""

import math
import pickle

import torch
from torch import nn

from transformer_engine.common.recipe import Recipe

active = []
"""The recipes of the contexts that are entered."""
forwards = []
"""For each forward of a module: its name, and the recipe that it ran with."""


class autocast:
    def __init__(
        self,
        enabled=True,
        calibrating=False,
        recipe=None,
        amax_reduction_group=None,
        _graph=False,
    ):
        assert recipe is None or isinstance(recipe, Recipe)
        self.recipe = recipe if enabled else None
        self.uses = 0

    def __enter__(self):
        # Before 2.16 it was made by contextlib, which serves once.
        self.uses += 1
        if self.uses > 1:
            raise RuntimeError("generator didn't yield")
        active.append(self.recipe)
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        assert active.pop() is self.recipe


class _Module(nn.Module):
    def get_extra_state(self):
        state = pickle.dumps({"recipe": active[-1:]})
        return torch.frombuffer(bytearray(state), dtype=torch.uint8)

    def set_extra_state(self, state):
        raise AssertionError("it would unpickle what is loaded")

    def _check(self, inputs):
        for parameter in self.parameters():
            assert not parameter.is_meta, "a parameter has no values"
            assert parameter.dtype == inputs.dtype, "the dtypes of weights and inputs differ"
        forwards.append((type(self).__name__, active[-1] if active else None))


class Linear(_Module):
    def __init__(
        self,
        in_features,
        out_features,
        sequence_parallel=False,
        fuse_wgrad_accumulation=False,
        tp_group=None,
        tp_size=1,
        get_rng_state_tracker=None,
        rng_tracker_name=None,
        init_method=None,
        bias=True,
        return_bias=False,
        params_dtype=None,
        parallel_mode=None,
        parameters_split=None,
        device="cuda",
        ub_overlap_ag=False,
        ub_overlap_rs=False,
        ub_overlap_rs_dgrad=False,
        ub_bulk_dgrad=False,
        ub_bulk_wgrad=False,
        ub_name=None,
        delay_wgrad_compute=False,
        symmetric_ar_type=None,
        save_original_input=False,
        name=None,
    ):
        super().__init__()
        params_dtype = torch.get_default_dtype() if params_dtype is None else params_dtype
        self.in_features, self.out_features = in_features, out_features
        self.use_bias = bias
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=params_dtype))
        if bias:
            made = torch.empty(out_features, device=device, dtype=params_dtype)
            self.bias = nn.Parameter(made)
        else:
            self.bias = torch.Tensor().to(dtype=params_dtype)  # no parameter, as there

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        self._check(inp)
        if active and active[-1] is not None:
            for tensor in (inp, self.weight):
                if math.prod(tensor.shape[:-1]) % 8 or tensor.shape[-1] % 16:
                    raise ValueError(f"FP8 execution requires dims divisible, got {tensor.shape}")
        return nn.functional.linear(inp, self.weight, self.bias if self.use_bias else None)


class LayerNorm(_Module):
    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        sequence_parallel=None,
        params_dtype=None,
        zero_centered_gamma=False,
        hidden_size=None,
        *,
        device=None,
        dtype=None,
        sm_margin=0,
    ):
        super().__init__()
        assert (params_dtype, hidden_size) == (None, None), "deprecated"
        shape = tuple(normalized_shape)
        self.eps = eps
        device = "cuda" if device is None else device
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self, inputs):
        self._check(inputs)
        shape = tuple(self.weight.shape)
        return nn.functional.layer_norm(inputs, shape, self.weight, self.bias, self.eps)
