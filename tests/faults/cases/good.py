"""Programs in which nothing is wrong must pass, without a word on stderr."""

from __future__ import annotations

from faults.blocks import RUN, TEXT, TRAIN, command, good, on

ALL = (1, 2, 3, 4)

FAULTS = (
    good("a training", "train()", ranks=ALL, by_all=("finished",), quick=(4, RUN)),
    good(
        "two pipelines in turn",
        """
with build() as a, build() as b:
    for _ in range(4):
        a.step(inputs, targets)
        b.evaluate(inputs, targets)
        b.step(inputs, targets)
print("finished")
""",
        by_all=("finished",),
        ranks=ALL,
    ),
    good(
        "two threads with a pipeline each",
        """
comms, seen = [comm.Dup(), comm.Dup()], []
def work(own):
    try:
        with mpipipe.Pipeline([nn.Stage([nn.Linear(64, 64)], first=rank)], schedule, own, loss=loss) as pipeline:
            for _ in range(5): pipeline.step(inputs, targets)
    except BaseException as error:
        seen.append(error)
threads = [threading.Thread(target=work, args=(own,)) for own in comms]
for each in threads: each.start()
for each in threads: each.join()
if seen: raise seen[0]
print("finished")
""",
        by_all=("finished",),
        ranks=(1, 2, 4),
    ),
    good(
        "messages of the user with the same tags",
        """
box, requests = np.zeros(20000), []
peer = (rank + 1) % size
for tag in range(20):
    requests.append(comm.Isend(np.full(20000, tag + 0.5), peer, tag))
train()
for tag in range(20):
    comm.Recv(box, (rank - 1) % size, tag)
    assert (box == tag + 0.5).all()
for each in requests: each.Wait()
""",
        ranks=(2, 4),
        by_all=("finished",),
    ),
    good("a rank that is 4 s late", on("last", "time.sleep(4)") + "train()", by_all=("finished",)),
    good("a slow stage", on("last", "breaks('forward', lambda: time.sleep(0.3))") + "train()", by_all=("finished",)),
    good("a rank that ends 5 s after the others", "train()\n" + on("last", "time.sleep(5)"), by_all=("finished",)),
    good(
        "a rank that is 4 s late for everything",
        on("last", "time.sleep(4)")
        + """
with mpipipe.Mesh(comm, pipe=size) as mesh: pass
ring()
optim.clip_by_global_norm(stages, 1.0, comm)
train()
""",
    ),
    good("rings and pipelines in turn", "for _ in range(3):\n    ring()\n    train()", ranks=ALL),
    good("a pipeline that is never closed", "pipeline = build()\npipeline.step(inputs, targets)", ranks=ALL),
    good("a pipeline that is never used", "build()", ranks=ALL),
    good(
        "ranks outside a communicator",
        """
part = comm.Split(0 if rank < 2 else 1, rank)
with mpipipe.Pipeline(stages, schedules.gpipe(part.size, 2), part, loss=loss) as pipeline:
    x = np.ones((1024, 64), np.float32)
    pipeline.step(x if part.rank == 0 else None, x if part.rank == part.size - 1 else None)
""",
        ranks=(3, 4),
    ),
    good("a rank without any work", on("0", "sys.exit(0)") + "comm = comm", ranks=(2, 4)),
    good("ranks that end one after another", "train()\ntime.sleep(rank)\nsys.exit(0)"),
    good(
        "an error that the user catches",
        """
try:
    schedules.by_name("no such schedule", ranks=size, chunks=1, microbatches=4)
except errors.MpipipeError:
    pass
train()
""",
        by_all=("finished",),
    ),
    good(
        "refusals that the user catches",
        """
for _ in range(5):
    try:
        mpipipe.Pipeline(stages * 2 if rank == last else stages, schedule, comm, loss=loss)
    except errors.MpipipeError:
        pass
train()
""",
        by_all=("finished",),
        ranks=(1, 2, 4),
    ),
    good("zero bubbles", "schedule = schedules.zero_bubble_h1(size, 4)\ntrain()", ranks=ALL, by_all=("finished",)),
    good("recomputation", "train(recompute=True)", ranks=ALL, by_all=("finished",)),
    command(
        "a training from the command line",
        "good program",
        *TRAIN,
        "--out",
        "run",
        before=(TEXT,),
        ranks=ALL,
        code=0,
        reports=0,
        quiet=True,
        prints=("mpipipe: ok",),
        after=(("-c", "open('run/metrics.jsonl')"),),
    ),
    command(
        "a text from a training",
        "good program",
        "-m",
        "mpipipe",
        "generate",
        "run",
        "--bytes",
        "9",
        code=0,
        reports=0,
        quiet=True,
        before=(TEXT, (*TRAIN, "--out", "run")),
    ),
    command("info", "good program", "-m", "mpipipe", "info", code=0, reports=0, prints=("MPI",), ranks=(1, 2, 4)),
)
