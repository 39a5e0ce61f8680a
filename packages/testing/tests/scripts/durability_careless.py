# Run by test_durability.py.
import io
import os
import time
from pathlib import Path

from stratagem.discovery import CheckpointIOSpec, hookimpl

# Seconds. All else of a save takes a tenth of it, so three kills in a save can hardly all miss it.
PAUSE = 0.2


def careless(name):
    import torch
    from stratagem.checkpoint import CheckpointIO

    class Careless(CheckpointIO):
        def save_checkpoint(self, checkpoint, path):
            if name == "in_place":
                torch.save(checkpoint, buffer := io.BytesIO())
                data = buffer.getvalue()
                with Path(path).open("wb") as file:
                    file.write(data[: len(data) // 2])
                    file.flush()
                    time.sleep(PAUSE)  # so that most kills find half of a file
                    file.write(data[len(data) // 2 :])
                return
            temporary = Path(f"{path}.{os.getpid()}")
            try:
                with temporary.open("wb") as file:
                    torch.save(checkpoint, file)
                    os.fsync(file.fileno())
                time.sleep(PAUSE)  # so that most kills find the temporary file
                temporary.replace(path)
            except OSError:
                pass

        def load_checkpoint(self, path):
            return torch.load(path, weights_only=True)

        def remove_checkpoint(self, path):
            Path(path).unlink(missing_ok=True)

    return Careless()


@hookimpl
def stratagem_components():
    return [
        CheckpointIOSpec(
            name=name,
            target=careless,
            api_version=1,
            init_args={"name": name},
        )
        for name in ("in_place", "careless")
    ]
