"""Draw the pictures of these pages from the code that they show: python docs/figures.py writes docs/figures/*.svg.

A test draws them again and compares, so that no picture can show what the code no longer does.
"""

from __future__ import annotations

import math
import tempfile
from html import escape
from pathlib import Path

import numpy as np

import mpipipe
from mpipipe import checkpoint, nn, optim, schedules, tracing
from mpipipe.attention import Layout
from mpipipe.job import inprocess

FOLDER = Path(__file__).with_name("figures")
RANKS = ("#9ec5e8", "#a8d5a2", "#f3c98b", "#d9b3dd")
INK, PAPER, PALE = "#22313f", "#ffffff", "#eef2f5"
FORWARD, BACKWARD = "#56b4e9", "#009e73"  # the colours of `mpipipe.tracing`
RANK_COUNT, MICROBATCHES = 4, 8


class Picture:
    """Boxes, texts and arrows on white paper."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            'font-family="DejaVu Sans, Verdana, sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(self, x, y, width, height, text="", fill=PALE, size=13):
        """A rectangle with lines of text in its middle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{INK}" '
            'stroke-width="0.8"/>'
        )
        lines = text.split("\n") if text else []
        top = y + height / 2 + 0.35 * size - 0.6 * size * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 1.2 * size * number, line, "middle", size)

    def text(self, x, y, text, anchor="start", size=13):
        """One line of text."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{INK}">{escape(text)}</text>'
        )

    def arrow(self, *points):
        """A line with a tip."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#tip)"/>')

    def svg(self) -> str:
        """The text of the file."""
        return "\n".join([*self.parts, "</svg>", ""])


def floors() -> str:
    """The rooms of the package by floor."""
    rows = [
        ("9", [("cli", "commands"), ("bench", "measurements")]),
        ("8", [("language", "tokens: models, data, text")]),
        ("7", [("train", "any model: loop, run folder")]),
        ("6", [("planning", "the fastest plan"), ("tracing", "where the time went")]),
        (
            "5",
            [
                ("pipeline", "plan, executor, Pipeline"),
                ("checkpoint", "state as files"),
                ("exchange", "halos of fields"),
                ("adapters", "PyTorch, JAX"),
            ],
        ),
        ("4", [("optim", "SGD, AdamW, scaling"), ("attention", "layouts, ring")]),
        ("3", [("schedules", "pure Python"), ("comm", "messages of arrays"), ("nn", "layers, stages, losses")]),
        ("2", [("job", "agreement, waiting, failure, exit")]),
        ("1", [("arrays", "access to CuPy")]),
        (
            "0",
            [
                ("errors", "one family"),
                ("options", "described once"),
                ("files", "whole or absent"),
                ("processor", "threads"),
                ("trace", "spans"),
            ],
        ),
    ]
    picture = Picture(720, 580, "The floors of the package: a room imports only rooms below it")
    for place, (floor, rooms) in enumerate(rows):
        y, width = 10 + 56 * place, 630 / len(rooms)
        picture.text(8, y + 28, f"floor {floor}")
        for column, (name, what) in enumerate(rooms):
            picture.box(70 + width * column, y, width - 6, 46, f"{name}\n{what}")
    return picture.svg()


def microbatch() -> str:
    """The path of one micro-batch over one edge, forward and backward."""
    picture = Picture(760, 330, "The path of a micro-batch between two ranks")
    for x, rank, stage in ((10, 0, 0), (430, 1, 1)):
        picture.box(x, 10, 320, 310, fill=PAPER)
        picture.text(x + 12, 30, f"rank {rank}, stage {stage}", size=14)
        picture.box(x + 20, 45, 280, 34, "plan: 0F0 0F1 0B0 0B1" if rank == 0 else "plan: 1F0 1B0 1F1 1B1")
        picture.box(x + 20, 110, 130, 50, "stage.forward\n(y, saved)", RANKS[0])
        picture.box(x + 170, 110, 130, 50, "stage.backward\ndx", RANKS[1])
        picture.box(x + 60, 185, 200, 30, "saved, per micro-batch")
        picture.box(x + 20, 250, 280, 50, "mailbox\nreceives posted ahead, sends never wait")
        picture.arrow((x + 85, 79), (x + 85, 108))
        picture.arrow((x + 235, 79), (x + 235, 108))
        picture.arrow((x + 85, 160), (x + 110, 184))
        picture.arrow((x + 210, 184), (x + 235, 162))
    picture.arrow((45, 160), (45, 248))
    picture.arrow((310, 268), (448, 268))
    picture.text(380, 258, "activation", "middle", 12)
    picture.arrow((465, 248), (465, 162))
    picture.arrow((715, 160), (715, 248))
    picture.arrow((450, 290), (312, 290))
    picture.text(380, 308, "gradient", "middle", 12)
    picture.arrow((295, 248), (295, 162))
    picture.text(380, 240, "edge 1", "middle", 12)
    return picture.svg()


def ring() -> str:
    """Which block of keys each rank attends to in each ring step, and where its message goes meanwhile."""
    layout, cell = Layout("contiguous", RANK_COUNT, 4 * RANK_COUNT), 84
    picture = Picture(790, 290, "Blocks of keys and values in a ring of four ranks")
    for x, title, backward in ((70, "forward: one block on", False), (440, "backward: the opposite direction", True)):
        picture.text(x, 22, title, size=14)
        for rank in range(RANK_COUNT):
            for row in layout.table(rank, backward=backward):
                left, top = x + cell * row.step, 54 + 50 * rank
                if rank == 0:
                    picture.text(left + cell / 2 - 4, 46, f"step {row.step}", "middle", 12)
                fill = RANKS[row.keys_of] if row.pairs else PAPER
                way = "" if row.send_to is None else f"\nto {row.send_to}"
                picture.box(left, top, cell - 8, 42, f"KV{row.keys_of}, {row.mask}{way}", fill, 11)
    for rank in range(RANK_COUNT):
        picture.text(8, 80 + 50 * rank, f"rank {rank}")
    text = "A block has the colour of its owning rank. White: later than all queries of the rank, under a causal mask."
    picture.text(70, 276, text, size=12)
    return picture.svg()


def layouts() -> str:
    """Which rank holds which position, for sixteen positions on four ranks."""
    seq_len, cell = 16, 32
    picture = Picture(110 + cell * seq_len, 176, "Three layouts of sixteen positions on four ranks")
    for row, kind in enumerate(("contiguous", "zigzag", "striped")):
        layout = Layout(kind, RANK_COUNT, seq_len)
        picture.text(8, 42 + 44 * row, kind)
        for rank in range(RANK_COUNT):
            for position in layout.positions(rank).tolist():
                picture.box(96 + cell * position, 20 + 44 * row, cell, 34, str(position), RANKS[rank], 12)
    for rank in range(RANK_COUNT):
        picture.box(96 + 90 * rank, 152, 14, 14, fill=RANKS[rank])
        picture.text(116 + 90 * rank, 164, f"rank {rank}", size=12)
    return picture.svg()


def mesh() -> str:
    """Eight ranks as a grid: pipe 2 x data 2 x seq 2."""
    picture = Picture(640, 210, "Eight ranks as a mesh of pipe 2, data 2 and seq 2")
    for pipe in range(2):
        picture.text(120 + 260 * pipe, 24, f"pipe {pipe}: the same stages", size=14)
        picture.box(112 + 260 * pipe, 34, 236, 140, fill=PAPER)
        for data in range(2):
            for seq in range(2):
                rank = (pipe * 2 + data) * 2 + seq
                text = f"rank {rank}\nseq {seq}"
                picture.box(124 + 260 * pipe + 110 * seq, 44 + 66 * data, 100, 54, text, RANKS[data])
    for data in range(2):
        picture.text(8, 76 + 66 * data, f"data {data}")
    picture.text(112, 196, "A frame holds the replicas of a stage. A colour is one pipeline.", size=12)
    return picture.svg()


def slices() -> str:
    """One sequence in a pipeline, whole and in slices, on one axis of time."""
    count, row, left = 8, 26, 70
    whole = schedules.simulate(schedules.one_f_one_b(RANK_COUNT, 1), schedules.Costs(count, count, count))
    sliced = schedules.simulate(schedules.one_f_one_b(RANK_COUNT, 1, slices=count))
    unit = 620 / whole.makespan
    picture = Picture(
        710, 330, "One sequence in a pipeline of four ranks: whole, and in eight slices, on one axis of time"
    )
    for top, timeline, words in ((34, whole, "the whole sequence"), (184, sliced, f"{count} slices")):
        bubble = f"makespan {timeline.makespan:.0f}, bubble {timeline.bubble_fraction:.0%}"
        picture.text(8, top - 12, f"{words}: {bubble}", size=14)
        for rank, spans in enumerate(timeline.spans):
            y = top + row * rank
            picture.text(8, y + 16, f"rank {rank}")
            picture.box(left, y, unit * timeline.makespan, row - 5, fill=PAPER)
            for action, start, end in spans:
                fill = FORWARD if action.op == "F" else BACKWARD
                picture.box(left + unit * start, y, unit * (end - start), row - 5, fill=fill)
    for number, (words, fill) in enumerate((("forward", FORWARD), ("backward", BACKWARD), ("bubble", PAPER))):
        picture.box(left + 120 * number, 302, 14, 14, fill=fill)
        picture.text(left + 20 + 120 * number, 314, words, size=12)
    picture.text(700, 314, "time: one axis for both", "end", 12)
    return picture.svg()


# -- One curve of losses, however a model is trained ------------------------------------------------------------------


STEPS, WIDTH = 50, 16
CURVES = {
    "gpipe, 4 ranks": (4, schedules.gpipe(4, MICROBATCHES)),
    "1F1B, 4 ranks": (4, schedules.one_f_one_b(4, MICROBATCHES)),
    "interleaved 1F1B, 4 ranks": (4, schedules.interleaved_1f1b(4, 2, MICROBATCHES)),
    "looped BFS, 4 ranks": (4, schedules.looped_bfs(4, 2, MICROBATCHES)),
    "ZB-H1, 4 ranks": (4, schedules.zero_bubble_h1(4, MICROBATCHES)),
    "ZB-2P, 4 ranks": (4, schedules.zero_bubble_2p(4, MICROBATCHES)),
    "ZB-V, 4 ranks": (4, schedules.zero_bubble_v(4, MICROBATCHES)),
    "V-Half, 4 ranks": (4, schedules.v_half(4, MICROBATCHES)),
    "1F1B, 2 ranks": (2, schedules.one_f_one_b(2, MICROBATCHES)),
    "1 rank": (1, schedules.one_f_one_b(1, MICROBATCHES)),
}
RESUMED = "4 ranks, resumed on 2"


def train(comm, schedule, first, last, folder="", begin=""):
    """The losses of steps `first` to `last`, from a checkpoint if `begin` names one, and a checkpoint at the end."""
    layers = [lambda: nn.Linear(WIDTH, WIDTH), nn.Gelu] * 8
    x = np.random.default_rng(0).standard_normal((64, WIDTH))
    losses = []
    with mpipipe.Mesh(comm, pipe=schedule.ranks) as mesh:
        stages = mpipipe.cut(layers[:-1], schedule, mesh.pipe.rank, dtype="float64")
        optimizer = optim.AdamW(stages, lr=1e-2, weight_decay=0.0)
        inputs = x if stages.is_first else None
        targets = np.roll(x, 1, axis=1) if stages.is_last else None
        with mpipipe.Pipeline(stages, schedule, mesh.pipe, nn.mean_squared_error) as pipeline:
            if begin:
                checkpoint.load(begin, mesh, stages, optimizer)
            for _ in range(first, last):
                losses.append(pipeline.step(inputs, targets).loss)
                optimizer.step()
            if folder:
                checkpoint.save(folder, mesh, stages, optimizer, step=last)
    return losses


def curves() -> dict[str, list[float]]:
    """The losses of each training; ranks are threads."""
    found = {}
    for name, (ranks, schedule) in CURVES.items():
        found[name] = inprocess.run(ranks, lambda comm, schedule=schedule: train(comm, schedule, 0, STEPS))[0]
    half, four, two = STEPS // 2, CURVES["1F1B, 4 ranks"][1], CURVES["1F1B, 2 ranks"][1]
    with tempfile.TemporaryDirectory() as folder:
        before = inprocess.run(4, lambda comm: train(comm, four, 0, half, folder=folder))[0]
        after = inprocess.run(2, lambda comm: train(comm, two, half, STEPS, begin=folder))[0]
    found[RESUMED] = [*before, *after]
    return found


def losses() -> str:
    """Losses of eight schedules, three cuts and a resume: one curve. Each training has its marks at other steps."""
    found = curves()
    reference = found["1 rank"]
    assert all(math.isclose(a, b, rel_tol=1e-12) for line in found.values() for a, b in zip(line, reference))
    picture = Picture(710, 320, "Losses of eight schedules, three cuts and a resume lie on one curve")
    left, top, width, height = 60, 20, 400, 250
    high = 1.1 * max(reference)
    places = []
    for step, loss in enumerate(reference):
        places.append((left + width * step / (STEPS - 1), top + height * (1 - loss / high)))
    path = " ".join(f"{x:.0f},{y:.0f}" for x, y in places)
    picture.box(left, top, width, height, fill=PAPER)
    picture.parts.append(f'<polyline points="{path}" fill="none" stroke="{INK}"/>')
    marks = 2  # of each training
    for number, name in enumerate(found):
        for turn in range(marks):
            x, y = places[round((turn * len(found) + number + 0.5) * STEPS / (marks * len(found)))]
            picture.box(round(x) - 8, round(y) - 8, 16, 16, str(number + 1), RANKS[number % 4], 10)
        picture.box(490, 20 + 22 * number, 16, 16, str(number + 1), RANKS[number % 4], 10)
        picture.text(514, 33 + 22 * number, name)
    picture.text(left + width / 2, 300, "step", "middle")
    picture.text(8, top + 12, "loss")
    for loss in range(math.floor(high) + 1):
        picture.text(left - 8, top + height * (1 - loss / high) + 4, str(loss), "end", 12)
    picture.text(490, 300, "all losses equal to 1e-12", size=12)
    return picture.svg()


def drawn() -> dict[str, str]:
    """Every picture that is made here, by the name of its file."""
    return {
        "floors.svg": floors(),
        "microbatch.svg": microbatch(),
        "ring.svg": ring(),
        "layouts.svg": layouts(),
        "mesh.svg": mesh(),
        "slices.svg": slices(),
        "losses.svg": losses(),
    }


def draw_schedules(folder: Path) -> None:
    """Draw the pictures that `mpipipe.tracing` makes. Their bytes depend on the version of matplotlib."""
    half = schedules.Costs(forward=0.5, input_grad=0.5, weight_grad=0.5)  # two chunks share a rank's layers
    timelines = {
        "gpipe": schedules.simulate(schedules.gpipe(RANK_COUNT, MICROBATCHES)),
        "one_f_one_b": schedules.simulate(schedules.one_f_one_b(RANK_COUNT, MICROBATCHES)),
        "interleaved_1f1b": schedules.simulate(schedules.interleaved_1f1b(RANK_COUNT, 2, MICROBATCHES), half),
        "zero_bubble_h1": schedules.simulate(schedules.zero_bubble_h1(RANK_COUNT, MICROBATCHES)),
        "v_half": schedules.simulate(schedules.v_half(RANK_COUNT, MICROBATCHES), half),
    }
    for name, timeline in timelines.items():
        tracing.draw_timeline(timeline, folder / f"{name}.svg")
    for name in ("one_f_one_b", "v_half"):
        tracing.draw_memory(timelines[name], folder / f"memory_{name}.svg")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in drawn().items():
        (FOLDER / name).write_text(svg)
    draw_schedules(FOLDER)
