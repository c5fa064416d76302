"""Every metric is declared once, documented, and logged as a plain number."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rljax.telemetry.metrics import BUCKETS, METRICS, as_numbers, declared, metrics_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_holds_the_table_of_the_code() -> None:
    assert metrics_table() in DOCUMENT.read_text(encoding="utf-8"), "write the output of metrics_table() into docs/metrics.md"


def test_every_metric_has_a_unit_and_a_sentence() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.unit
        assert metric.meaning.endswith(".")
        assert "|" not in metric.meaning, "it would break the table"


def test_every_bucket_of_the_clock_is_a_metric() -> None:
    for bucket in BUCKETS:
        assert declared(f"time/{bucket}").unit == "s"


def test_undeclared_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"'policy/clip_fractoin' is not declared; did you mean policy/clip_fraction\?"):
        as_numbers({"policy/clip_fractoin": 0.1})
    for name in ("reward/component/", "reward/component", "loss", "time/sampling/x"):
        with pytest.raises(ValueError, match="not declared"):
            declared(name)


def test_components_of_the_reward_need_no_declaration_of_their_own() -> None:
    assert declared("reward/component/answer").name == "reward/component/<name>"
    assert declared("reward/component/format/boxed").unit == "reward"


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (True, 1),
        (np.int64(2**62 + 1), 2**62 + 1),
        (0.1, 0.1),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (ml_dtypes.bfloat16(0.5), 0.5),
        (np.array(ml_dtypes.bfloat16(1.5)), 1.5),
        (np.array([[2.5]]), 2.5),
    ],
)
def test_scalars_of_every_kind_become_numbers(value: object, number: float) -> None:
    (converted,) = as_numbers({"loss/kl": value}).values()
    assert converted == number
    assert type(converted) is type(number)


def test_device_scalars_become_numbers() -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert as_numbers({"loss/kl": jnp.asarray(0.25, jnp.bfloat16), "tokens/trained": jnp.asarray(7)}) == {
        "loss/kl": 0.25,
        "tokens/trained": 7,
    }


@pytest.mark.parametrize("value", ["1.0", None, [1, 2], np.zeros(2), np.array([]), 1j, np.zeros((), [("a", "f4")]), b"1"])
def test_what_is_not_one_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="'loss/kl' needs one number per step"):
        as_numbers({"loss/kl": value})
