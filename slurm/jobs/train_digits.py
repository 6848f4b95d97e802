"""Train a small network on the 1,797 handwritten digits that scikit-learn ships, data-parallel on hpcdist.

    mpirun -n 4 python train_digits.py                 # or srun, or torchrun --nproc-per-node 4
    python train_digits.py                             # alone
    mpirun --with-ft ulfm -n 5 python train_digits.py --elastic --spares 1    # goes on when ranks die

SIGTERM or SIGUSR1 to any rank (Slurm's --signal) ends it after the epoch, with the checkpoint saved. An epoch in which
a rank dies is made again.

Each global batch is divided among the ranks and the gradients are summed, so that the result does not
depend on how many ranks there are.
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpcdist as dist

TEST_SAMPLES = 360


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--global-batch",
        type=int,
        default=64,
        help="samples a step, over all ranks; fewer if they do not divide among them",
    )
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, help="folder for the states after the last epochs")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state, if there is one")
    parser.add_argument("--elastic", action="store_true", help="go on when a rank dies (mpirun --with-ft ulfm)")
    parser.add_argument("--spares", type=int, default=0, help="ranks that wait to take a dead one's place")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that a call may take")
    parser.add_argument("--init-method", help="without MPI: tcp://host:port, file:///path, slurm://")
    parser.add_argument("--rank", type=int, default=-1, help="with --init-method, where no launcher says it")
    parser.add_argument("--world-size", type=int, default=-1)
    return parser.parse_args()


class Clock:
    """Adds up the seconds spent in communication."""

    seconds = 0.0

    @contextmanager
    def communicating(self):
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Read the digits once a node and hand them to the node's other ranks."""
    node, _ = dist.new_subgroups()
    data = [None, None]
    if dist.get_rank(node) == 0:
        from sklearn.datasets import load_digits

        digits = load_digits()
        data = [digits.data / 16.0, digits.target]
    dist.broadcast_object_list(data, group=node, group_src=0)
    pixels, labels = torch.as_tensor(data[0]).view(-1, 1, 8, 8), torch.as_tensor(data[1])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_SAMPLES:], order[:TEST_SAMPLES]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def network() -> nn.Module:
    """Return two convolutions and a linear layer, in double precision: sums of any grouping agree closely."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).double()


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of test samples recognised; each rank looks at its part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pixels, labels = (tensor[rank::size] for tensor in test.tensors)
    with torch.no_grad():
        correct = (model(pixels).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    return correct.item() / len(test)


class Checkpoints:
    """The states after each epoch, in a folder a state, written in a thread while training goes on.

    torch.distributed.checkpoint (DCP) writes ``.metadata`` last: a job killed meanwhile leaves the state before whole.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.group = self.written = None

    def states(self) -> list[Path]:
        """Return the folders of states, whose names are ``epochs-change``, the newest last."""
        found = [each for each in self.folder.glob("*-*") if re.fullmatch(r"\d+-\d+", each.name)]
        return sorted(found, key=lambda each: [int(number) for number in each.name.split("-")])

    def whole(self) -> list[Path]:
        """Return the states that can be loaded, the newest last."""
        return [each for each in self.states() if (each / ".metadata").exists()]

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def resume(self) -> int:
        """Load the newest state, on any number of ranks, and return the first epoch to run."""
        newest = [str((self.whole() or [""])[-1])]
        dist.broadcast_object_list(newest)  # as rank 0 sees the folder
        if not newest[0]:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=newest[0])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(Path(newest[0]).name.split("-")[0])

    def regroup(self) -> None:
        """Make a group for the writing among the ranks there are now; what was being written is given up."""
        self.group, self.written = dist.new_group(), None

    def save(self, epochs: int, change: int) -> None:
        """Begin to write the state, when the one before is whole."""
        self.wait()
        place = self.folder / f"{epochs}-{change}"  # a rank that died may have left a part of the same epoch
        self.written = dcp.async_save(self.state(), checkpoint_id=place, process_group=self.group)

    def wait(self) -> None:
        """Return when the last state is whole, and remove what is older than it and the one before."""
        if self.written is None:
            return
        try:
            self.written.result()
        except CheckpointException as error:  # the job may have lost a rank, which the elastic job makes good
            raise dist.DistBackendError("the checkpoint could not be written") from error
        self.written = None
        if dist.get_rank() == 0:
            states, newest = self.states(), self.whole()[-2:]
            for old in states[: states.index(newest[-1])]:
                if old not in newest:
                    shutil.rmtree(old, ignore_errors=True)


def train_epoch(model, optimizer, loader, global_batch: int, clock: Clock) -> float:
    """Go through this rank's share of each global batch; return the mean loss of all ranks."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    parameters = list(model.parameters())
    total, steps = torch.zeros((), dtype=torch.float64), 0
    for pixels, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(pixels), labels) / global_batch
        loss.backward()
        with clock.communicating():
            dist.all_reduce_coalesced([parameter.grad for parameter in parameters])
        optimizer.step()
        total += loss.detach()
        steps += 1
    with clock.communicating():
        dist.all_reduce(total)
    return total.item() / steps


def divide(train: TensorDataset, options) -> tuple[DistributedSampler, DataLoader, int]:
    """Return this rank's share of the samples among the ranks there are now, and the samples of a step."""
    size = dist.get_world_size()
    sampler = DistributedSampler(train, size, dist.get_rank(), seed=options.seed)
    share = max(1, options.global_batch // size)
    return sampler, DataLoader(train, share, sampler=sampler, drop_last=True), share * size


def run_epoch(epoch: int, model, optimizer, data, test: TensorDataset) -> None:
    """Train for one epoch and print its figures."""
    sampler, loader, batch = data
    size = dist.get_world_size()
    sampler.set_epoch(epoch)
    clock, start = Clock(), time.perf_counter()
    loss = train_epoch(model, optimizer, loader, batch, clock)
    elapsed = time.perf_counter() - start
    reached = accuracy(model, test)
    figures = [None] * size
    dist.all_gather_object(figures, {"seconds": elapsed, "communicating": clock.seconds})
    if dist.get_rank() == 0:
        slowest = max(each["seconds"] for each in figures)
        share = sum(each["communicating"] / each["seconds"] for each in figures) / size
        speed = len(loader) * batch / slowest
        print(f"{epoch + 1:5d} {loss:9.4f} {reached:9.4f} {speed:10,.0f} {share:16.1%}", flush=True)


def main() -> None:
    options = arguments()
    dist.init_process_group(
        init_method=options.init_method,
        timeout=timedelta(seconds=options.timeout),
        rank=options.rank,
        world_size=options.world_size,
    )
    rank, size = dist.get_rank(), dist.get_world_size() - options.spares
    if not options.elastic:
        warnings.filterwarnings("ignore", "this job ends when a rank dies")
    torch.manual_seed(options.seed + rank)  # every rank starts elsewhere, until rank 0's parameters arrive
    train, test = load_data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    checkpoints = Checkpoints(options.checkpoint, model, optimizer) if options.checkpoint else None
    first = checkpoints.resume() if options.resume and checkpoints else 0
    if rank == 0:
        print(f"{size} ranks on {dist.get_backend()}, {len(train)} training and {len(test)} test samples")
        print(f"{'epoch':>5} {'loss':>9} {'accuracy':>9} {'samples/s':>10} {'in communication':>17}")
    done, data = first, None

    def setup() -> None:
        nonlocal data
        data = divide(train, options)
        if checkpoints:
            checkpoints.regroup()
        if job.changes and job.rank == 0:
            print(f"a rank has died, going on with {job.size}", flush=True)

    with dist.elastic(options.spares) as job:
        state = {"model": model, "optimizer": optimizer}
        for step in job.steps(state, max(first, options.epochs), start=first, setup=setup):
            with step as epoch:
                run_epoch(epoch, model, optimizer, data, test)
                done = epoch + 1
                is_last = done == options.epochs
                if dist.stop_requested():
                    job.stop()
                    is_last = True
                if checkpoints:
                    checkpoints.save(done, job.changes)
                    if is_last:
                        checkpoints.wait()
        if job.rank is not None:
            reached = accuracy(model, test)
        if job.rank == 0:
            if done < options.epochs:
                print("stopped by a signal; --resume goes on from the checkpoint")
            print(f"held-out accuracy {reached:.4f} after {done} epochs on {job.size} ranks")


if __name__ == "__main__":
    main()
