"""The benchmark of devices, in short: what a device carries, and whether bits are the same."""

from experiments.benchmarks import devices


def test_microbatches_on_one_and_two(capsys) -> None:
    short = ["--devices", "1", "2", "--steps", "2", "--rounds", "1", "--microbatches", "2"]
    devices.WAYS = ("microbatches",)
    devices.main(devices.parser().parse_args(short))
    _, one, two = capsys.readouterr().out.splitlines()
    assert one.split()[:2] == ["microbatches", "1"] and two.split()[-1] == "same"


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
