"""The benchmark of devices, in short: what a device carries, and whether bits are the same."""

import pytest

from experiments.benchmarks import devices
from experiments.benchmarks.workloads import transformer_task


@pytest.mark.long
def test_each_way_on_one_device_in_short(monkeypatch, capsys) -> None:
    tiny = lambda steps: transformer_task(steps, width=8, depth=1, length=4, batch_size=4, examples=8)  # noqa: E731
    monkeypatch.setattr(devices, "small_transformer", tiny)
    here = lambda way, count, arguments: devices.measured(way, count, arguments.steps, arguments.rounds, 2)  # noqa: E731
    monkeypatch.setattr(devices, "in_process", here)
    devices.main(devices.parser().parse_args(["--devices", "1", "--steps", "2", "--rounds", "1"]))
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:13].strip() for line in lines] == [way[:13].strip() for way in devices.WAYS]
    assert all(line.endswith("same") for line in lines)


def test_what_is_read_from_a_program() -> None:
    text = """%body (x: f32[2]) -> f32[2] {
  %a = (f32[10]{0}, s64[3]{0}) all-reduce(%x, %y), channel_id=1
}
ENTRY %main (x: f32[2]) -> f32[2] {
  %b = f32[100]{0} all-gather(%x), channel_id=2
  %w = (s32[], s64[100]{0}, u16[2,40]{1,0}, f32[7]{0}) while(%t), condition=%c, body=%body
}
"""
    assert devices.sent(text) == 40 + 24
    assert devices.carried(text) == 800 + 160
