"""If this fails, verification breaks off, misses what a decoder or a level tells, or finds faults where there are none.

``python -m tests.support.mutated_images`` does the same with more images, and prints tables.
"""

import pytest

from tests.support.mutated_images import CODECS, PLACES, make, outcomes, verified


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_sound_images(tmp_path, codec, thorough):
    """Of every codec, Zarr format and kind of shard: nothing is found."""
    made = make(tmp_path / "i", [3, list(CODECS).index(codec)], codec)
    outcome = verified(made, "", [made.folder], thorough=thorough)
    assert outcome.state == "equal", outcome


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_mutated_images(seed):
    """Verification does not break off, and finds what zarr-python or NumPy tell, at the right chunk or level."""
    states = []
    for number, made, name, thorough, outcome in outcomes(60, seed, each=15):
        about = (seed, number, name, made.group, made.method, thorough, outcome)
        assert outcome.state not in ("MISSED", "CRASH"), about
        assert name != "none" or outcome.state == "equal", about
        assert name not in PLACES or outcome.told != "level" or outcome.proposed, about
        states.append(outcome.state)
    assert states.count("found") > 60
