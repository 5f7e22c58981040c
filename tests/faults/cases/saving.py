"""Trainings that save at every step are broken: they end as they should, and their last checkpoint can be loaded."""

from __future__ import annotations

import signal

from faults.blocks import NONZERO, PLAIN, RUN, TEXT, command, on
from faults.fault import Send
from faults.saving_blocks import BEFORE, KIND, dies_in_forward, dies_outside, loads, raises, refused, saving, signalled

FAULTS = (
    raises("a forward", "nn.Stage", "forward", "micro-batch", modes=(RUN, PLAIN)),
    raises("a backward", "nn.Stage", "backward", "micro-batch"),
    raises("a loss", "Shard", "loss"),
    raises("an optimizer", "optim.AdamW", "step", quick=(2, RUN)),
    saving(
        "an exception in a thread of the user's own",
        "keys.update(steps=9)\n"
        + on(
            "last",
            "during(Trainer, 'validate', lambda: [each.start() or each.join() for each in "
            "[threading.Thread(target=fail)]])",
        ),
        "wet paint",
        code=0,
        reports=0,
        never=(),
        by_all=("finished",),
    ),
    saving(
        "sys.exit(3) in a step",
        on("last", "during(optim.AdamW, 'step', lambda: sys.exit(3))"),
        "exited with code 3",
        code=3,
        reports=None,
    ),
    saving(
        "os._exit(0) in a forward",
        on("last", "during(nn.Stage, 'forward', lambda: os._exit(0))"),
        "rank {last}",
        code=NONZERO,
        reports=None,
    ),
    *dies_in_forward(signal.SIGKILL),
    *dies_in_forward(signal.SIGSEGV),
    *dies_outside(signal.SIGKILL),
    *dies_outside(signal.SIGKILL, ", without the runner", modes=(PLAIN,)),
    *dies_outside(signal.SIGSEGV),
    signalled(signal.SIGTERM, 1, "SIGTERM of rank 1 from outside"),
    signalled(signal.SIGINT, "group", "Ctrl-C under MPICH", mpi="mpich", code=130, reports=1),
    signalled(signal.SIGINT, "group", "Ctrl-C under Open MPI", mpi="openmpi"),
    saving(
        "SIGSTOP of a rank for 2 s",
        "keys.update(steps=40)\n",
        sends=(Send(signal.SIGSTOP, 1, at="step  9/"), Send(signal.SIGCONT, 1, at="", after=2.0)),
        code=0,
        reports=0,
        never=(),
        by_all=("finished",),
    ),
    saving(
        "SIGSTOP of a rank for good",
        "",
        "no rank has made progress",
        "rank 1 on",
        "it is stopped by a signal",
        sends=(Send(signal.SIGSTOP, 1, at="step    9/"),),
        code=124,
    ),
    saving(
        "a rank that stalls",
        on("last", "during(nn.Stage, 'forward', lambda: time.sleep(1000))"),
        "no rank has made progress",
        "rank {last} on",
        "has been computing",
        code=124,
    ),
    saving(
        "a rank that stalls, without the runner",
        on("last", "during(nn.Stage, 'forward', lambda: time.sleep(1000))"),
        "rank {last} on",
        "has been computing",
        plain_code=124,
        modes=(PLAIN,),
    ),
    saving(
        "a rank that comes to its limit of memory (ulimit -v)",
        on(
            "last",
            """
def limit():
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (1 << 26), held + (1 << 26)))
    np.ones(1 << 27)
during(nn.Stage, "forward", limit)
""",
        ),
        "MemoryError",
        "micro-batch",
    ),
    saving(
        "a shape of one rank",
        on(
            "0",
            """
def narrow(self, *arguments, original=nn.Stage.forward):
    y, saved = original(self, *arguments)
    return (y[:, :-1].copy() if at >= 3 else y), saved
nn.Stage.forward = narrow
""",
        ),
        "rank",
        code=(1, 2),
    ),
    saving(
        "a parameter of one replica",
        "keys.update(pipe=1, microbatches=2, check_weights=1)\n"
        + on(
            "last",
            """
def drift(self, *arguments, original=optim.AdamW.step, **options):
    original(self, *arguments, **options)
    if at >= 3:
        self.stages[0].parameters["0.weight"].view(np.uint32)[0, 0] ^= 1
optim.AdamW.step = drift
""",
        ),
        "ReplicaError",
        "replicas differ in parameters/0.weight",
        "on rank {last}",
        code=2,
        quick=(2, RUN),
    ),
    refused("another schedule on one rank", "keys.update(schedule='gpipe')", "MismatchError: rank {last}", "schedule"),
    refused("other micro-batches on one rank", "keys.update(microbatches=2)", "MismatchError: rank {last}"),
    refused("another dtype on one rank", "keys.update(dtype='float64')", "MismatchError: rank {last}", "dtype"),
    refused("another width on one rank", "keys.update(dim=32)", "MismatchError: rank {last}", "dim"),
    refused(
        "other data on one rank",
        "keys.update(data=('other.txt',))\nopen('other.txt', 'w').write('or not to be\\n' * 20000)",
        "MismatchError",
        "rank {last}",
    ),
    saving(
        "a disk that is full at a checkpoint",
        on("last", "during(Trainer, 'step', lambda: no_room(1000))"),
        "the checkpoint cannot be written",
        "step-0000000",
        code=(0, 1, 2),
        reports=None,
        quick=(2, RUN),
    ),
    saving(
        "a disk that is full for metrics",
        "keys.update(steps=9)\n"
        + on(
            "0",
            """
def full():
    links = {int(name): os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    for descriptor, path in links.items():
        if path.endswith("metrics.jsonl"):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
during(Trainer, "step", full)
""",
        ),
        "metrics.jsonl cannot be written: No space left on device; the training goes on",
        code=0,
        reports=0,
        never=(),
        by_all=("finished",),
    ),
    saving(
        "a disk that is full for weights",
        "keys.update(steps=4)\n" + on("0", "during(weights, 'save', lambda: no_room(1000))"),
        "the weights cannot be written",
        code=(1, 2),
    ),
    command(
        "a launcher of another MPI while a training is to go on",
        KIND,
        *BEFORE,
        "--resume",
        "auto",
        before=(TEXT, BEFORE),
        after=loads(),
        env={"PMI_SIZE": "4"},
        ranks=(0,),
        says=("LaunchError", "found: 1 rank", "PMI_SIZE"),
        code=NONZERO,
        reports=None,
        limit=30,
    ),
    command(
        "another configuration on all ranks while a training is to go on",
        KIND,
        *BEFORE,
        "--resume",
        "auto",
        "--lr",
        "0.5",
        before=(TEXT, BEFORE),
        after=loads(),
        says=("ConfigError", "another configuration", "lr"),
        code=2,
        limit=30,
    ),
)
