"""The docstrings of the public face: complete in the form of numpydoc, and with examples that run as written."""

import dataclasses
import inspect
import re

import pytest
from support.launch import ROOT, run_job
from support.public_face import public_face

pytest.importorskip("numpydoc")

# the modules whose public face is held to this
ROOMS = """adapters attention checkpoint job.inprocess comm.mesh errors exchange language.models
    language.models.huggingface nn optim planning schedules tracing train""".split()
ROOMS = ["mpipipe", *(f"mpipipe.{room}" for room in ROOMS)]

CODES = {  # of numpydoc.validate
    "GL06": "a section that numpydoc does not know",
    "GL07": "sections in another order",
    "GL08": "no docstring",
    "SS01": "no summary",
    "SS06": "a summary of several lines",
    "PR01": "parameters without documentation",
    "PR02": "documentation of parameters that do not exist",
    "PR03": "parameters in another order",
    "PR04": "a parameter without a type",
    "RT01": "no section Returns",
    "YD01": "no section Yields",
}
SERIES = r"(list|tuple)\[(int|float|str)(, \.\.\.)?\]"
PLAIN_TYPE = rf"(int|str|bool|float|None|os\.PathLike\[str\]|[A-Z][A-Za-z]*(\[None\])?|{SERIES})"
PLAIN = re.compile(rf"{PLAIN_TYPE}( \| {PLAIN_TYPE})*")  # annotations that say all of a type
NOUNS = set("A An The This These It Its What Which Who Whose Whether How Where There".split())


def _is_record(value) -> bool:
    """Whether this is a dataclass or a named tuple."""
    return dataclasses.is_dataclass(value) or hasattr(value, "_fields")


def _plain_parts(value) -> set[str]:
    """Return which sections a docstring may leave out: where few annotations of plain types say as much."""
    doc = inspect.getdoc(value) or ""
    if not inspect.isfunction(value):
        return set()
    entries = [entry for name, entry in inspect.signature(value).parameters.items() if name not in ("self", "cls")]
    plain = [isinstance(each.annotation, str) and PLAIN.fullmatch(each.annotation) for each in entries]
    result = value.__annotations__.get("return", "")
    codes = {"PR01"} if len(entries) <= 2 and all(plain) and "Parameters\n-----" not in doc else set()
    return codes | ({"RT01"} if isinstance(result, str) and PLAIN.fullmatch(result) and result != "Any" else set())


def wrong_docstring(value) -> list[str]:
    """What numpydoc finds wrong in the docstring of a function, property or class."""
    from numpydoc.docscrape import get_doc_object
    from numpydoc.validate import Validator, validate

    class FieldsAreParameters(Validator):
        """For results, whose fields are documented as attributes and are the parameters of the constructor, too.

        A class that has no constructor of its own has the parameters that it documents: the base says the others.
        """

        def __init__(self, obj_name):
            super().__init__(get_doc_object(obj_name))

        @property
        def signature_parameters(self):
            own = "__init__" in vars(self.obj) if inspect.isclass(self.obj) else True
            protocol = getattr(self.obj, "_is_protocol", False)  # typing gives it a constructor, which raises
            if inspect.isclass(self.obj) and not _is_record(self.obj) and (protocol or not own):
                return tuple(self.doc_all_parameters)
            return super().signature_parameters

        @property
        def doc_all_parameters(self):
            documented = dict(super().doc_all_parameters)
            if _is_record(self.obj):
                for names, kind, text in self.doc["Attributes"]:
                    for name in names.split(", "):
                        # numpydoc lists fields with the default None as attributes, too, without a type
                        if name in self.signature_parameters and name not in documented:
                            documented[name] = (kind, text)
            return documented

    plain = _plain_parts(value)
    found = [
        f"{code} {text}"
        for code, text in validate(value, FieldsAreParameters)["errors"]
        if code in CODES and code not in plain
    ]
    summary = (inspect.getdoc(value) or "").split()
    if inspect.isfunction(value) and summary and summary[0] in NOUNS:
        found.append(f"the summary of a function begins with a verb in the imperative, not with {summary[0]!r}")
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_public_docstrings_are_complete(room):
    wrong = {name: found for name, value in public_face(room) if (found := wrong_docstring(value))}
    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())


@pytest.mark.long
def test_examples_run_as_written():
    """In a process of its own, without a launcher, as a reader runs them."""
    result = run_job(0, ["-m", "support.public_face", *ROOMS], env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert ": 0 examples\n" not in result.stdout, "a public module shows at least one example"
