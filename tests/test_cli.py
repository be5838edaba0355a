"""If this fails, scripts choose another device than was asked for, or say something wrong at their end."""

import pytest

from linumpy import cli
from linumpy import device as devices
from linumpy.errors import GpuUnavailableError


def parse(*words):
    parser = cli.Parser("linum-test")
    cli.add_gpu_arguments(parser)
    return parser.parse_args(words)


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


@pytest.mark.parametrize(("words", "expected"), [([], True), (["--use_gpu"], True), (["--no-use_gpu"], False)])
def test_the_device_where_there_is_a_gpu(gpu, words, expected):
    gpu(None)
    assert cli.choose_device(parse(*words)) is expected


def test_the_device_where_there_is_none(gpu):
    gpu("no wool in this machine")
    assert cli.choose_device(parse()) is False
    assert cli.choose_device(parse("--no-use_gpu")) is False
    with pytest.raises(GpuUnavailableError, match="no wool in this machine"):
        cli.choose_device(parse("--use_gpu"))


def test_the_environment_is_asked_where_the_arguments_say_nothing(gpu, monkeypatch):
    gpu(None)
    monkeypatch.setenv(devices.DEVICE_VARIABLE, "cpu")
    assert cli.choose_device(parse()) is False
    assert cli.choose_device(parse("--use_gpu")) is True


def test_no_gpu_where_one_is_asked_for_ends_a_script_with_2_and_the_reason(gpu, capsys):
    gpu("no wool\nin this machine")
    parser = cli.Parser("linum-test")
    cli.add_common_arguments(parser)
    cli.add_gpu_arguments(parser)
    assert cli.run(parser, lambda parsed: print(cli.choose_device(parsed)), ["--use_gpu"]) == 2
    told = capsys.readouterr()
    assert told.err == "linum-test: error: no wool in this machine\n"
    assert told.out == ""


def test_help_names_both_ways(capsys):
    parser = cli.Parser("linum-test")
    cli.add_gpu_arguments(parser)
    with pytest.raises(SystemExit) as stop:
        parser.parse_args(["--help"])
    assert stop.value.code == 0
    assert "--use_gpu, --no-use_gpu" in capsys.readouterr().out


def test_the_closing_line():
    line = cli.closing_line("a.zarr", "b.png", True, 2.0, 3 * 2**30)
    assert line == "a.zarr -> b.png on GPU: 3 GiB, 2.00 s, 1.5 GiB/s"
    line = cli.closing_line(["a", "b", "c"], "d", False, 0.0, 0)
    assert line == "a and 2 more -> d on CPU: 0 bytes, 0.00 s, 0 bytes/s"
    line = cli.closing_line("a", "b", False, 0.5, 3 * 2**20)
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

    assert cli.run(cli.Parser("linum-test"), body, []) == 143
    assert capsys.readouterr().err == "linum-test: terminated\n"
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_script_may_run_in_a_thread():
    from threading import Thread

    codes = []
    thread = Thread(target=lambda: codes.append(cli.run(cli.Parser("linum-test"), lambda parsed: None, [])))
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

    parser = cli.Parser("linum-test")
    assert cli.run(parser, fail, []) == 2
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
    parser = cli.Parser("program")
    cli.add_volume_arguments(parser, all_of_them=True)
    cli.add_common_arguments(parser)
    parser.add_argument("--levels", type=int)

    def fail(parsed):
        raise ValueError(message)

    assert cli.run(parser, fail, []) == 2
    assert capsys.readouterr().err == f"program: error: {spelled}\n"


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (976, "976 bytes"), (1000, "0.977 KiB"), (1536, "1.5 KiB"), (999 * 2**10, "999 KiB"),
     (1008 * 2**10, "0.984 MiB"), (2**20, "1 MiB"), (1010 * 2**20, "0.986 GiB"), (2**31, "2 GiB")],
)  # fmt: skip
def test_sizes_have_three_digits(nbytes, text):
    assert cli.size_text(nbytes) == text


def test_old_name_of_the_option(caplog):
    parser = cli.Parser("program")
    cli.add_levels_argument(parser)
    assert parser.parse_args([]).levels == 1
    assert parser.parse_args(["--levels", "3"]).levels == 3
    assert not caplog.records
    assert parser.parse_args(["--n_levels", "3"]).levels == 3
    assert [record.message for record in caplog.records] == ["--n_levels is called --levels now"]
