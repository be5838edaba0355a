"""Read what ``soct_3d_reconst.nf`` and ``nextflow.config`` say, as far as they use Nextflow's language.

Nextflow itself cannot be had here. What this reader does not know is an error, so the workflow stays within it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

WORKFLOWS = Path(__file__).parents[2] / "workflows"
_TOKEN = re.compile(r'"""(?:\\.|(?!""").)*"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_PAIRS = {")": "(", "]": "[", "}": "{"}
#: The functions that scripts call, as they must stand there, and what they do.
FUNCTIONS = {
    "option(flag, value)": "value == null ? '' : \"--${flag} ${value}\"",
}


@dataclass(frozen=True)
class Process:
    """A process: its inputs as lists of (kind, name, staged as), its outputs by name, and its script."""

    name: str
    inputs: list
    outputs: dict
    script: str
    publish: str
    body: str


def blank(text):
    """Replace strings and comments by blanks of the same length."""
    return _TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def check_balanced(text):
    """Raise ValueError, naming the line, unless every bracket outside of strings and comments has its other one."""
    open_, bare = [], blank(text)
    if '"' in bare or "'" in bare:
        raise ValueError("a string does not end")
    for place, character in enumerate(bare):
        line = bare.count("\n", 0, place) + 1
        if character in "([{":
            open_.append((character, line))
        elif character in _PAIRS and (not open_ or open_.pop()[0] != _PAIRS[character]):
            raise ValueError(f"line {line}: {character} closes nothing")
    if open_:
        raise ValueError(f"line {open_[-1][1]}: {open_[-1][0]} is never closed")


def block(text, head):
    """Return what stands in the braces after a head."""
    bare = blank(text)
    begin = re.search(rf"^[ ]*{head}\s*\{{", bare, re.MULTILINE).end()
    depth, place = 1, begin
    while depth:
        depth += {"{": 1, "}": -1}.get(bare[place], 0)
        place += 1
    return text[begin : place - 1]


def names(text, kind):
    return re.findall(rf"^{kind} (\w+) \{{", blank(text), re.MULTILINE)


def process(text, name):
    """Read a process."""
    body = block(text, f"process {name}")
    parts = re.split(r"^    (input|output|script):$", body, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    inputs = [_elements(line.strip()) for line in sections["input"].strip().splitlines()]
    outputs = {}
    for line in sections["output"].strip().splitlines():
        declared, emit = re.fullmatch(r"\s*(.*), emit: (\w+)", line).groups()
        outputs[emit] = _elements(declared)
    (script,) = re.fullmatch(r'\s*"""\n(.*)\n\s*"""\s*', sections["script"], re.DOTALL).groups()
    (publish,) = re.findall(r"^    publishDir \"(.*)\", mode: 'copy'$", parts[0], re.MULTILINE)
    return Process(name, inputs, outputs, script, publish, body)


def _elements(declared):
    """Take ``tuple val(name), path("x")`` apart."""
    found = re.findall(r"(val|path)\(([^()]*?)(?:, stageAs: '([^']*)')?\)", declared)
    again = ", ".join(f"{kind}({name}{', stageAs: ' + repr(staged) if staged else ''})" for kind, name, staged in found)
    assert declared.removeprefix("tuple ") == again, declared
    assert (len(found) > 1) == declared.startswith("tuple "), declared
    return [(kind, name.strip('"'), staged) for kind, name, staged in found]


def statements(text, params):
    """List the workflow's statements that are carried out with some parameters: (name, expression or arguments).

    A process is called with a list of arguments; a channel is assigned an expression.
    """
    made, known, taken = [], names(text, "process"), [True]
    for line in block(text, "workflow").splitlines():
        line = line.split(" //")[0].strip()
        begun = re.fullmatch(r"if \((.*)\) \{", line)
        call = re.fullmatch(r"(\w+)\((.*)\)", line)
        assigned = re.fullmatch(r"(\w+) = (.*)", line)
        if begun:
            taken.append(any(_holds(one, params) for one in begun[1].split(" || ")))
        elif line == "} else {":
            taken[-1] = not taken[-1]
        elif line == "}":
            taken.pop()
        elif not line or line.startswith("//") or not all(taken):
            continue
        elif call and call[1] in known:
            made.append((call[1], [one.strip() for one in call[2].split(", ")]))
        elif assigned:
            made.append((assigned[1], assigned[2]))
        else:
            raise ValueError(line)
    assert taken == [True]
    return made


def _holds(condition, params):
    name, comparison = re.fullmatch(r"params\.(\w+)( [!=]= null)?", condition).groups()
    if comparison is None:
        return params[name]
    return (params[name] is None) == (comparison == " == null")


def defaults(config):
    """Read the block of params."""
    values = {}
    for line in block(config, "params").strip().splitlines():
        name, value = re.fullmatch(r"\s*(\w+) = ('[^']*'|[\w.]+)\s*(?://.*)?", line).groups()
        simple = {"null": None, "true": True, "false": False}
        values[name] = simple[value] if value in simple else value.strip("'")
    return values


def render(text, params, variables):
    """Substitute ``${...}`` as Groovy does, for what the workflow uses: variables, params and its function."""

    def value(expression):
        option = re.fullmatch(r"option\('([\w-]+)', (?:params\.(\w+)|(\w+) \?: null)\)", expression)
        if option:
            given = params[option[2]] if option[2] else variables[option[3]] or None
            return "" if given is None else f"--{option[1]} {_spelled(given)}"
        param = re.fullmatch(r"params\.(\w+)", expression)
        return _spelled(params[param[1]]) if param else str(variables[expression])

    assert "\\" not in text
    assert "$" not in re.sub(r"\$\{[^{}]*\}", "", text)
    return re.sub(r"\$\{([^{}]*)\}", lambda match: value(match[1]), text)


def _spelled(value):
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, str) else value
