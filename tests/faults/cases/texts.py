"""The text of an exception, whatever it holds, reaches the report."""

from __future__ import annotations

from faults.blocks import RUN, Fault, failing, on

C_LOCALE = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

# what the text holds -> (its Python expression, what the report must hold)
TEXTS = {
    "a file name that is not UTF-8": ("'cannot use ' + os.fsdecode(b'caf\\xe9.txt')", "cannot use caf"),
    "a zero byte": ("'wet\\0paint'", "wet"),
    "a megabyte": ("'wet paint ' * 100000", "wet paint wet paint"),
    "many lines": ("'\\n'.join(map(str, range(3000))) + ' wet paint'", "2999 wet paint"),
    "nothing": ("''", "ValueError"),
    "braces and percent signs": ("'{0} {x} %s %d [bold]wet[/bold]'", "{0} {x} %s %d [bold]wet[/bold]"),
    "control characters": ("'\\x1b[2Jwet paint\\r\\b'", "wet paint"),
}


def _in_forward(holds, **options) -> Fault:
    expression, text = TEXTS[holds]
    body = on("last", f"breaks('forward', lambda: fail({expression}))") + "train()"
    return failing(f"{holds} in a forward", "text", body, text, "micro-batch 0", **options)


FAULTS = (
    *(_in_forward(holds, ranks=(1, 2), **({"quick": (2, RUN)} if "UTF-8" in holds else {})) for holds in TEXTS),
    failing(
        "foreign letters in the C locale",
        "text",
        on("last", "fail('gr\\u00fcn')") + "train()",
        "ValueError: gr",
        env=C_LOCALE,
    ),
    failing(
        "a surrogate as text of an exit",
        "text",
        on("0", "sys.exit(os.fsdecode(b'caf\\xe9'))") + "train()",
        "caf",
        modes=(RUN,),
    ),
)
