"""The memory calculator: each phase's largest moment as a bar against a card's capacity."""

from course_lib import facts, units
from course_lib.facts import Accelerator, ModelConfig
from course_lib.memory import CONVENTIONS, OPTIMIZERS, num_params
from course_lib.moments import STEPS, Moment, Moments, moments
from course_lib.views import controls, style

PARTS = ("weights", "optimizer state", "gradients", "activations", "temporaries", "gathered")
FILL = {"gathered": "inputs"}  # a part that is drawn in another category's colour
MODELS = {config.name: config for config in facts.models() if config.family == "llama"}
CARDS = {card.name: card for card in facts.accelerators() if card.reported_bytes}
CLOSE = 0.05  # of a card: a device's context and an allocator's rounding come on top
LENGTHS = ("128", "256", "512", "1024", "2048", "4096", "8192")
LEFT, WIDE, TOP, ROW = 12, 556, 62, 52  # pixels: the bars' box, and from one bar to the next


def calculator(config: ModelConfig | None = None):
    """What a step needs, and whether a card holds it; `config` adds a model of your own."""
    models = MODELS if config is None else {"yours": config} | MODELS
    longest = 2048 if config is None else config.max_seq_len
    start = max((n for n in LENGTHS if int(n) <= min(longest, 2048)), key=int, default=LENGTHS[0])

    def view(**state) -> style.Picture:
        return calculator_view(models[state.pop("model")], **state)

    return controls.explore(
        view,
        model=controls.Choice("model", tuple(models), "llama-2-7b" if config is None else "yours"),
        convention=controls.Choice("convention", tuple(CONVENTIONS), "fp32"),
        optimizer=controls.Choice("optimizer", tuple(OPTIMIZERS), "adamw"),
        update=controls.Choice("update", STEPS, "foreach"),
        batch=controls.Slider("batch, each device", 1, 64, 1, 1),
        micro_batches=controls.Choice("micro-batches", ("1", "2", "4", "8"), "1"),
        seq=controls.Choice("sequence", LENGTHS, start),
        checkpointing=controls.Choice("checkpointing", ("off", "on"), "off"),
        card=controls.Choice("card", tuple(CARDS), "A100-SXM4-80GB"),
        devices=controls.Choice("devices", ("1", "2", "4", "8", "16", "64"), "1"),
        zero=controls.Choice("ZeRO stage", ("0", "1", "2", "3"), "0"),
        explain=controls.Choice("explain", PARTS, "weights"),
    )


def calculator_view(
    config: ModelConfig,
    convention: str,
    optimizer: str,
    update: str,
    batch: int,
    micro_batches: str,
    seq: str,
    checkpointing: str,
    card: str,
    devices: str,
    zero: str,
    explain: str,
) -> style.Picture:
    """A bar for each phase and one for the sum, the capacity as a line, one part explained."""
    step = moments(
        config,
        convention,
        batch=batch,
        seq=int(seq),
        optimizer=optimizer,
        step=update,
        accumulate=int(micro_batches),
        checkpointing=checkpointing == "on",
        zero_stage=int(zero),
        data_parallel=int(devices),
    )
    held, peak = CARDS[card], step.peak
    over = peak.total_bytes - held.capacity_bytes
    if over > 0:
        verdict = f"out of memory by {units.binary(over)}"
    else:
        close = -over < CLOSE * held.capacity_bytes
        verdict = f"{'may fit' if close else 'fits'}, {units.binary(-over)} to spare"
    largest = max(peak.parts, key=peak.parts.get)
    lines = _explained(explain, step)
    if zero != "0" and devices == "1":
        lines.append("ZeRO divides among devices: one has nothing to divide")
    elif zero != "0":
        lines.append("ZeRO's figure is a floor: nothing fetched ahead, no buckets to send")
    lines += _not_counted(config)
    bars = [*step.phases, Moment("all that lasts, added up", "", _sum(step), "")]
    drawing = style.svg(
        580,
        TOP + len(bars) * ROW + 40 + 18 * len(lines),
        style.text(LEFT, 22, f"{held.name}: {verdict}", anchor="start", size=15, bold=True),
        *_legend(),
        *_bars(bars, held),
        *_text(lines, TOP + len(bars) * ROW + 38),
    )
    sentence = (
        f"{units.binary(peak.total_bytes)} at the peak, in {peak.name}, and {held.name} has "
        f"{units.binary(held.capacity_bytes)}: {verdict}. The largest part "
        f"then: {largest}, {units.binary(peak.parts[largest])}. All that lasts, added up: "
        f"{units.binary(step.sum_bytes)}. {' '.join(f'{line}.' for line in lines)}"
    )
    return style.Picture(drawing, "a step's memory", sentence)


def _sum(step: Moments) -> dict[str, int]:
    """Every part at its largest that the ledger and the activations know."""
    last = step.moments[-1].parts
    kept = {"activations": step.activations.total_bytes}
    passing = ("temporaries", "gathered")
    return {name: size for name, size in last.items() if name not in passing} | kept


def _bars(bars: list[Moment], card: Accelerator) -> list[str]:
    most = 1.05 * max(card.capacity_bytes, *(bar.total_bytes for bar in bars))
    drawn = []
    for row, bar in enumerate(bars):
        top, at = TOP + row * ROW, float(LEFT)
        said = f"{bar.name}: {units.binary(bar.total_bytes)}"
        drawn.append(style.text(LEFT, top + 12, said, anchor="start"))
        for name, size in bar.parts.items():
            wide = WIDE * size / most
            if wide >= 0.1:
                drawn.append(style.bar(at, top + 18, wide, 22, FILL.get(name, name)))
            at += wide
    at, bottom = LEFT + WIDE * card.capacity_bytes / most, TOP + len(bars) * ROW
    drawn.append(
        style.line(at, TOP - 4, at, bottom, color=style.COLOR["moment"], width=2, dash="5 3")
    )
    said = f"the card: {units.binary(card.capacity_bytes)}"
    drawn.append(style.text(at, bottom + 14, said, anchor="end" if at > 290 else "start", size=12))
    return drawn


def _legend() -> list[str]:
    drawn, at = [], LEFT
    for name in PARTS:
        drawn.append(style.bar(at, 34, 12, 12, FILL.get(name, name)))
        drawn.append(style.text(at + 17, 44, name, anchor="start", size=12))
        at += 30 + round(6.3 * len(name))
    return drawn


def _not_counted(config: ModelConfig) -> list[str]:
    """What a config can't say, and the sign that this one doesn't say it."""
    lines = ["Not counted: experts, norms beyond Llama's and qk_norm, dropout, capped logits"]
    given, published = num_params(config), config.published_params
    if published not in (None, given):
        lines.append(f"Published: {published:,} parameters; these dimensions give {given:,}")
    return lines


def _text(lines: list[str], top: float) -> list[str]:
    return [
        style.text(LEFT, top + 18 * i, line, anchor="start", size=12)
        for i, line in enumerate(lines)
    ]


def _explained(part: str, step: Moments) -> list[str]:
    """The formula behind a part's bytes."""
    if part == "activations":
        kept = step.activations
        rest = kept.total_bytes - kept.num_layers * kept.layer_bytes
        each, beside = units.binary(kept.layer_bytes), units.binary(rest)
        said = [f"activations: {kept.num_layers} layers × {each} + {beside} for head and loss"]
        if kept.copied_bytes:
            said.append(f"of these, copies of weights: {units.binary(kept.copied_bytes)}")
        return said
    if part == "temporaries":
        return [f"{m.phase}: {units.binary(m.parts[part])}, {m.passing}" for m in step.phases]
    if part == "gathered":
        return [
            f"{m.name}: weights of a layer or the head, {units.binary(m.parts[part])}"
            for m in step.phases
            if m.parts.get(part)
        ] or ["gathered: nothing; ZeRO stage 3 gathers the weights at hand"]
    rows = [row for row in step.ledger.rows if row.role.part == part]
    params = f"{step.ledger.num_params:,}"
    return [
        f"{row.name}: {row.bytes_per_param:.7g} B × {params} = {units.binary(row.num_bytes)}"
        for row in rows
    ] or [f"{part}: none"]
