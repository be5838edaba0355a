"""The benchmark of resampling: its cases are right, and its checks notice what is wrong."""

import numpy as np
import pytest

from linumpy.benchmark.kernel_run import make_cases
from linumpy.benchmark.resampling import MAKERS
from scripts import linum_benchmark_resampling as script


@pytest.mark.parametrize("name", MAKERS)
def test_a_case_is_right_and_its_check_can_fail(name):
    (case,) = make_cases(MAKERS, np, 0.06, (name,))
    result = case.ours()
    assert case.name == name
    assert case.check(result) == ""
    assert case.check(result + result.dtype.type(2)) != ""
    assert np.allclose(case.peer().astype("f8"), result, atol=1)
    assert case.nbytes > 0


def test_without_a_gpu_it_says_so(capsys):
    from linumpy.device import why_no_cuda

    if why_no_cuda() is None:
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as caught:
        script.main([])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
