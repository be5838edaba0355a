"""If this fails, scripts choose another device than was asked for, or say something wrong at their end."""

import io
import logging
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from linumpy import cli, progress
from linumpy import device as devices
from linumpy.declared import Count, Declared, Help, Positive
from linumpy.progress import LogHandler, progress_bar


def parsed_by(*options, words):
    return cli.Command("linum-test", None, print, *options).parser().parse_args(words)


def device_of(*words):
    return cli.device_and_name(parsed_by(*cli.shared("device"), words=words))


@pytest.fixture
def gpu(monkeypatch):
    """Make a GPU look there, or not."""

    def set_up(missing):
        monkeypatch.delenv(devices.DEVICE_VARIABLE, raising=False)
        monkeypatch.setattr(devices, "why_no_cuda", lambda device_id=None: missing)

        class Cupy:
            class cuda:  # noqa: N801
                class Device:
                    id = 0

        monkeypatch.setattr(devices, "_import_cupy", lambda: Cupy)

    return set_up


GPU, CPU = ("cuda", "GPU"), ("cpu", "CPU")


@pytest.mark.parametrize(("words", "expected"), [([], GPU), (["--device=cuda"], GPU), (["--device=cpu"], CPU)])
def test_the_device_where_there_is_a_gpu(gpu, words, expected):
    gpu(None)
    assert device_of(*words) == expected


def test_the_device_where_there_is_none(gpu):
    gpu("no wool in this machine")
    assert device_of() == CPU
    assert device_of("--device=cpu") == CPU


def test_the_environment_is_asked_where_the_arguments_say_nothing(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    assert device_of() == CPU
    assert device_of("--device=cuda") == GPU


def test_no_gpu_where_one_is_asked_for_ends_a_script_with_2_and_the_reason(gpu, capsys):
    gpu("no wool\nin this machine")
    command = cli.Command(
        "linum-test", None, lambda parsed: print(cli.device_and_name(parsed)), *cli.shared(*cli.TILES)
    )
    assert command(["--device=cuda"]) == 2
    told = capsys.readouterr()
    assert told.err == "linum-test: error: no wool in this machine\n"
    assert told.out == ""


@dataclass(frozen=True)
class Record(Declared):
    count: Annotated[Count, Help("How many.", "N")]
    share: Annotated[Positive | None, Help("A share of 100 %. [estimated]", "S", option="part")] = None
    kind: Annotated[Literal["a", "b"], Help("Which.")] = "b"
    is_on: Annotated[bool, Help("Or not.")] = True
    is_off: Annotated[bool, Help("Or so.")] = False


def test_options_of_a_record(capsys):
    """Its fields are declared once: names, types, choices, defaults, helps, and checks of values."""
    options = list(cli.options_of(Record, "a group"))
    parser = cli.Command("linum-test", None, print, *options).parser()
    text = " ".join(parser.format_help().split())
    for told in ("a group: --count N How many. --part S A share of 100 %. [estimated]", "--kind {a,b} Which. [b]",
                 "--is-on, --no-is-on Or not. [on]", "--is-off Or so."):  # fmt: skip
        assert told in text
    parsed = parser.parse_args(["--count", "2", "--part", "0.5", "--no-is-on"])
    assert cli.record_of(parsed, Record) == Record(2, 0.5, is_on=False)
    command = cli.Command("linum-test", None, lambda parsed: cli.record_of(parsed, Record), *options)
    assert command(["--count", "1", "--part", "-1"]) == 2
    assert capsys.readouterr().err == "linum-test: error: --part -1.0: pass a number above 0\n"
    with pytest.raises(SystemExit):
        command([])
    assert "required: --count" in capsys.readouterr().err


def test_memory_is_in_gib():
    options = list(cli.shared("memory"))
    assert cli.memory_bytes(parsed_by(*options, words=["--memory", "1.5"])) == 3 * 2**29
    assert cli.memory_bytes(parsed_by(*options, words=[])) is None


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
@pytest.mark.parametrize("words", [[], ["-v"], ["-q"]])
def test_bars_need_a_terminal_and_quiet_leaves_only_results_and_errors(monkeypatch, capsys, words, stream):
    def body(parsed):
        monkeypatch.setattr(sys, "stderr", stream())
        with progress_bar("reading", 2, "slice") as advance:
            advance(1)
            cli.say("a summary")
            LogHandler(sys.stderr).handle(logging.makeLogRecord({"msg": "a warning"}))
            print("a result")
        raise ValueError("an error")

    assert cli.Command("linum-test", None, body)(words) == 2
    informs, errors = words != ["-q"], sys.stderr.getvalue()
    assert capsys.readouterr().out == "a summary\n" * informs + "a result\n"
    assert ("reading:" in errors, "slice/s" in errors) == (informs and stream is Terminal,) * 2
    assert errors.endswith("linum-test: error: an error\n")
    assert re.search(r"(^|\r)a warning\n", errors)  # in a line of its own
    assert not progress.is_quiet


def test_the_closing_line():
    line = cli.closing_line("a.zarr", "b.png", "GPU", 2.0, 3 * 2**30)
    assert line == "a.zarr -> b.png on GPU: 3 GiB, 2.00 s, 1.5 GiB/s"
    line = cli.closing_line(["a", "b", "c"], "d", "CPU", 0.0, 0)
    assert line == "a and 2 more -> d on CPU: 0 bytes, 0.00 s, 0 bytes/s"
    line = cli.closing_line("a", "b", "CPU", 0.5, 3 * 2**20)
    assert line == "a -> b on CPU: 3 MiB, 0.50 s, 6 MiB/s"
    assert " on cuda:1: " in cli.closing_line("a", "b", "cuda:1", 1, 1)


def test_a_script_that_is_told_to_end_cleans_up_first(capsys):
    import os
    import signal
    import time

    cleaned, before = [], signal.getsignal(signal.SIGTERM)

    def body(parsed):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            cleaned.append(True)

    assert cli.Command("linum-test", None, body)([]) == 143
    assert capsys.readouterr().err == "linum-test: terminated\n"
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_script_may_run_in_a_thread():
    from threading import Thread

    codes = []
    thread = Thread(target=lambda: codes.append(cli.Command("linum-test", None, lambda _: None)([])))
    thread.start()
    thread.join()
    assert codes == [0]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "error: not enough memory"),
        (OSError(), "error: OSError"),
        (ValueError("one\n  two"), "error: one two"),
    ],
)
def test_an_error_is_one_line_that_says_something(error, said, capsys):
    def fail(parsed):
        raise error

    assert cli.Command("linum-test", None, fail)([]) == 2
    assert capsys.readouterr().err == f"linum-test: {said}\n"


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        ("no unit; pass spacing= in µm", "no unit; pass --spacing Z Y X in µm"),
        ("channel=5: there are 3", "--channel 5: there are 3"),
        ("choose by time= (0 to 1), channel=.", "choose by --time T (0 to 1), --channel C."),
        ("spacing=(1.0, 2.0): three", "--spacing (1.0, 2.0): three"),
        ("levels=0: 1 to 4 resolutions", "--levels 0: 1 to 4 resolutions"),
        ("replace it with overwrite=True", "replace it with --overwrite"),
        ("buffer_bytes=3 is of the library alone", "buffer_bytes=3 is of the library alone"),
        ("/data/time=3/x.zarr is not there", "/data/time=3/x.zarr is not there"),
    ],
)
def test_errors_name_options(message, spelled, capsys):

    def fail(parsed):
        raise ValueError(message)

    assert cli.Command("program", None, fail, *cli.shared(*cli.VOLUME, "levels", "overwrite"))([]) == 2
    assert capsys.readouterr().err == f"program: error: {spelled}\n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (976, "976 bytes"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (999 * 2**10, "999 KiB"),
     (1008 * 2**10, "0.984 MiB"), (2**20, "1 MiB"), (1010 * 2**20, "0.986 GiB"), (2**31, "2 GiB")],
)  # fmt: skip
def test_sizes_have_three_digits(nbytes, text):
    assert cli.size_text(nbytes) == text


def test_a_command_whose_output_nobody_reads_any_more_ends_without_a_word():
    """As in ``linum-gpu-info | head -1``."""
    program = Path(sys.executable).parent / "linum-gpu-info"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([program], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
