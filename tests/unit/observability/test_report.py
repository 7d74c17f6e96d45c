"""The report: a sentence and a picture from metrics.jsonl."""

from pathlib import Path

import matplotlib.image
import pytest

from forge.errors import ForgeError
from forge.observability.jsonl import JSONLSink
from forge.observability.report import Row, draw_report, read_metrics, summarize
from forge.observability.view import SFT_VIEW


def rows_of(steps: int, **metrics: float) -> list[Row]:
    return [{"step": step, "time": 100.0 + 30 * step, **metrics} for step in range(1, steps + 1)]


def test_the_sentence_says_where_it_began_and_what_it_reached() -> None:
    rows = rows_of(20, **{"time/step_s": 30.0})
    for row, reward in zip(rows, [0.1, 0.2, 0.3, *[0.5] * 7, *[0.9] * 10], strict=True):
        row["reward/mean"] = reward
    assert summarize(rows) == "mean reward 0.200 (first 3) to 0.900 (last 10) in 20 steps, 10.0 min"


def test_an_app_may_be_about_another_metric(tmp_path: Path) -> None:
    rows = rows_of(6, **{"loss/total": 2.0, "time/step_s": 10.0})
    rows[0]["validation/loss"], rows[5]["validation/loss"] = 2.5, 1.75
    assert summarize(rows, SFT_VIEW) == "validation loss 2.500 to 1.750 in 6 steps, 1.0 min"
    assert draw_report(rows, tmp_path / "report.png", view=SFT_VIEW).stat().st_size > 0


def test_the_sentence_and_the_picture_have_the_evaluations(tmp_path: Path) -> None:
    rows = rows_of(30, **{"reward/mean": 0.5, "time/step_s": 2.0})
    plain = draw_report(rows, tmp_path / "plain.png").read_bytes()
    rows.insert(0, {"step": 0, "time/step_s": 2.0, "evaluation/avg@4": 0.25, "evaluation/pass@4": 0.9})
    rows[10]["evaluation/avg@4"], rows[30]["evaluation/avg@4"] = 0.875, 0.75
    assert summarize(rows) == (
        "mean reward 0.500 (first 3) to 0.500 (last 10), evaluation avg@4 0.250 to 0.750 (best 0.875 at "
        "step 10) in 30 steps, 1.0 min"
    )
    assert draw_report(rows, tmp_path / "report.png").read_bytes() != plain
    draw_report(rows[:1], tmp_path / "first.png")  # killed in the first step


def test_a_short_or_empty_run_has_a_sentence_too() -> None:
    assert summarize([]) == "no step was finished"
    assert summarize(rows_of(1)) == "no reward was recorded in 1 steps, 0.0 min"
    assert summarize(rows_of(2, **{"reward/mean": 0.5})).startswith(
        "mean reward 0.500 (first 2) to 0.500 (last 2)"
    )


def test_what_the_sink_wrote_is_what_the_report_reads(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"reward/mean": 0.25, "loss/kl": float("inf")})
    sink.close()
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["step"], row["reward/mean"], row["loss/kl"]) == (1, 0.25, float("inf"))


def test_a_missing_or_broken_file_is_named_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="there is no metrics file"):
        read_metrics(tmp_path / "no.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"step": 1}\n{"ste')
    with pytest.raises(ForgeError, match=r"bad\.jsonl, line 2 is not JSON"):
        read_metrics(tmp_path / "bad.jsonl")


@pytest.mark.parametrize("steps", [0, 1, 60])
def test_the_picture_has_four_panels_whatever_was_recorded(tmp_path: Path, steps: int) -> None:
    rows = rows_of(steps, **{"reward/mean": 0.5, "loss/entropy": float("nan"), "time/step_s": 3.0})
    image = draw_report(rows, tmp_path / "new" / "report.png", "a title")
    pixels = matplotlib.image.imread(image)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    half_height, half_width = pixels.shape[0] // 2, pixels.shape[1] // 2
    for top in (pixels[:half_height], pixels[half_height:]):
        for panel in (top[:, :half_width], top[:, half_width:]):
            assert panel[..., :3].min() < 0.5  # something is drawn
