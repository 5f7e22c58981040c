"""Ways to damage a folder: its bytes, tensors and facts; and a checkpoint, with checksums that fit its manifest."""

import json

from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mpipipe.checkpoint import folders

FILES = ("manifest.json", "part-0.safetensors", "part-1.safetensors")
# what a wrong or hostile manifest may hold anywhere
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, 2**62, 2**80, -(2**70)]), st.floats(),
    st.sampled_from(["", "F32", "BF16", "X9", "00000000", "../../etc/passwd", "/etc/passwd", "part-0.safetensors"]),
    st.lists(st.integers(-1, 2**70), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip
KINDS = ("flip", "cut", "grow", "remove", "swap", "text", "value", "value", "value", "name")
SEALED = ("value", "name")  # with a checksum that belongs to what is said: a newer, a foreign or a hostile manifest
NAMES = st.sampled_from(
    ["../part-0.safetensors", "/etc/passwd", "part-0.safetensors/../../x", "", ".", "part-0.bin", "part-\n.safetensors"]
)


def on_bytes(file, change):
    """A function that changes the content of a file in a folder."""
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def on_json(file, change):
    """A function that changes the facts of a file in a folder."""

    def damage(folder):
        facts = json.loads((folder / file).read_text())
        change(facts)
        (folder / file).write_text(json.dumps(facts))

    return damage


def on_tensors(file, change):
    """A function that changes the tensors of a file in a folder."""

    def damage(folder):
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return damage


def flipped(place, bit=4):
    """A function that flips a bit of a byte; `place` counts from the end where it is negative."""

    def flip(content):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        return bytes(changed)

    return flip


def sealed(facts):
    """The text of a manifest with the checksum that belongs to it, as somebody would write who knows the format."""
    facts = {key: value for key, value in facts.items() if key != "checksum"}
    return json.dumps({**facts, "checksum": folders.checksum_of(facts)})


def places(value, path=()):
    """The path to everything in a tree of JSON."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


@st.composite
def damages(draw):
    """(what is done, a function that does it to a folder)."""
    kind = draw(st.sampled_from(KINDS))
    name, share = draw(st.sampled_from(FILES)), draw(st.integers(0, 9999)) / 10_000

    if kind == "flip":
        bit = draw(st.integers(0, 7))
        return kind, on_bytes(name, lambda content: flipped(int(share * len(content)), bit)(content))
    if kind == "cut":
        return kind, on_bytes(name, lambda content: content[: int(share * len(content))])
    if kind == "grow":
        return kind, on_bytes(name, lambda content: content + b"\0" * (1 + int(share * 100)))
    if kind == "text":
        text = draw(
            st.sampled_from([b"", b"[]", b"null", b"{}", b"[" * 100_000, b"\xff", b'{"format": "1"}', b"1" * 5000])
        )
        return kind, lambda folder: (folder / "manifest.json").write_bytes(text)
    if kind == "remove":
        return kind, lambda folder: (folder / name).unlink()
    if kind == "swap":

        def swap(folder):
            one, other = folder / FILES[1], folder / FILES[2]
            one.rename(folder / "x"), other.rename(one), (folder / "x").rename(other)

        return kind, swap
    value, new_name = draw(VALUES), draw(NAMES)

    def edit(folder):
        facts = json.loads((folder / "manifest.json").read_text())
        del facts["checksum"]
        inside = list(places(facts))[1:]
        *path, last = inside[int(share * len(inside))]
        part = facts
        for key in path:
            part = part[key]
        if kind == "name":
            file = facts["files"].pop(FILES[1])
            facts["files"][new_name] = file
        else:
            part[last] = value
        (folder / "manifest.json").write_text(sealed(facts))

    return f"{kind} {value!r} {new_name!r}", edit
