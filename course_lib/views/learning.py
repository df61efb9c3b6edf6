"""What is learnt, and how it goes: images of digits, and losses over the updates."""

import math

import torch

from course_lib.views import style


def show_digits(images: torch.Tensor, labels: torch.Tensor) -> None:
    """Show 8 × 8 images (n, 64) of pixels between 0 and 1 in a row, labels (n,) above them."""
    if images.dim() != 2 or images.shape[1] != 64 or len(images) != len(labels):
        raise ValueError(
            f"images must be (n, 64) and labels (n,), got {tuple(images.shape)} and "
            f"{tuple(labels.shape)}"
        )
    pixel, gap = 9, 12
    parts = []
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        left = gap / 2 + i * (8 * pixel + gap)
        parts.append(style.text(left + 4 * pixel, 18, str(label.item()), size=15))
        for j, ink in enumerate(image.tolist()):
            grey = round(255 * (1 - ink))
            parts.append(
                f'<rect x="{left + j % 8 * pixel:.0f}" y="{26 + j // 8 * pixel}" '
                f'width="{pixel}" height="{pixel}" fill="#{grey:02x}{grey:02x}{grey:02x}"/>'
            )
    drawing = style.svg(len(images) * (8 * pixel + gap), 26 + 8 * pixel + 6, *parts)
    sentence = f"The first labels: {' '.join(str(label.item()) for label in labels)}."
    style.show(style.Picture(drawing, f"{len(images)} digits", sentence))


def show_losses(losses: list[float], title: str) -> None:
    """Show the loss of each update as a line, and say where it began, ended, fell and rose."""
    finite = next((i for i, x in enumerate(losses) if not math.isfinite(x)), len(losses))
    lost = f" From update {finite + 1} on it is not finite." if finite < len(losses) else ""
    losses = losses[:finite]
    if len(losses) < 2:
        raise ValueError(f"a curve needs two finite losses or more, got {len(losses)}")
    left, top, width, height = 50, 46, 600, 160
    most = 1.05 * max(losses) or 1.0

    def y(loss: float) -> float:
        return top + height * (1 - loss / most)

    points = " ".join(
        f"{left + i * width / (len(losses) - 1):.1f},{y(loss):.1f}" for i, loss in enumerate(losses)
    )
    between = 10 ** math.floor(math.log10(most))  # of the ticks on the loss axis
    ticks = [i * between for i in range(int(most / between) + 1)]
    every = max(1, round(len(losses) / 5, -1)) if len(losses) > 20 else 1
    parts = [
        style.text(12, 22, title, anchor="start", size=15, bold=True),
        style.line(left, top, left, top + height),
        style.line(left, top + height, left + width, top + height),
        *(style.text(left - 6, y(tick) + 4, f"{tick:g}", anchor="end") for tick in ticks),
        *(style.line(left - 4, y(tick), left, y(tick)) for tick in ticks),
        *(
            style.text(left + (k - 1) * width / (len(losses) - 1), top + height + 18, f"{k:g}")
            for k in [1, *range(int(every), len(losses) + 1, int(every))]
        ),
        style.text(left, top - 8, "loss"),
        style.text(left + width / 2, top + height + 38, "update"),
        f'<polyline points="{points}" fill="none" stroke="{style.COLOR["weights"]}" '
        'stroke-width="1.8"/>',
    ]
    pairs = list(zip(losses, losses[1:], strict=False))
    falls, rises = sum(b < a for a, b in pairs), sum(b > a for a, b in pairs)
    sentence = (
        f"The loss goes from {losses[0]:.2f} to {losses[-1]:.2f}. It fell in {falls} updates and "
        f"rose in {rises}.{lost}"
    )
    style.show(style.Picture(style.svg(680, 252, *parts), "loss over updates", sentence))
