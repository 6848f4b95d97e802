"""Scripts of Lightning and Accelerate as their users write them, on two ranks of MPI: `make versions` installs both."""

import importlib.util
import textwrap

import pytest

from tests import programs

pytestmark = pytest.mark.timeout(400)  # Lightning is imported for seconds

TRAINER = """
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy
    import torch

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, index):
            return self.layer(batch[0]).square().mean()

        def train_dataloader(self):
            data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 64).view(16, 4))
            return torch.utils.data.DataLoader(data, batch_size=2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    strategy = DDPStrategy(process_group_backend=sys.argv[1] if sys.argv[1:] else None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    model = Model()
    Trainer(accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, **quiet).fit(model)
    weight = model.layer.weight
"""
FABRIC = """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy
    import torch

    strategy = DDPStrategy(process_group_backend=sys.argv[1] if sys.argv[1:] else None)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        optimizer.zero_grad()
        fabric.backward(model(torch.ones(8, 4) + fabric.global_rank).square().mean())
        optimizer.step()
    weight = next(model.parameters())
"""
ACCELERATE = """
    from accelerate import Accelerator
    import torch

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.linspace(0, 1, 64).view(16, 4), batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for batch in data:
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    weight = next(model.parameters())
"""
# after each: whether both ranks hold the same parameters, and whose group averaged their gradients
SHOWN = """
    import torch.distributed

    weights = [None, None]
    torch.distributed.all_gather_object(weights, weight.detach())
    group = torch.distributed.group.WORLD
    kind = type(group.backends["cpu"]).__name__ if hasattr(group, "backends") else "stock"
    words = torch.distributed.get_rank(), torch.distributed.get_world_size(), kind, torch.equal(*weights)
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    torch.distributed.destroy_process_group()
"""
BEFORE = {"torch": "", "import": "    import hpcdist\n", "run": ""}


@pytest.mark.parametrize(
    ("library", "script", "door"),
    [
        *[
            pytest.param("lightning", script, door, id=f"{name}-{door}")
            for name, script in (("trainer", TRAINER), ("fabric", FABRIC))
            for door in BEFORE
        ],
        # it takes no name of a backend that it does not know
        pytest.param("accelerate", ACCELERATE, "run", id="accelerate-run"),
    ],
)
def test_an_unmodified_script_trains_over_mpi(library, script, door, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent("    import os, sys\n" + BEFORE[door] + script + SHOWN))
    program = ["-m", "hpcdist", "run", path] if door == "run" else [path, "hpcdist"]
    done = programs.mpirun(2, ["-W", "ignore", *program], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith(("True", "False"))]
    assert sorted(lines) == ["0 2 MPIBackend True", "1 2 MPIBackend True"], done.stdout + done.stderr
