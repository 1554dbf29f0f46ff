"""Prepare a picture for a vision model: checked by content, bounded, upright, without metadata.

``python -m tool_servers.visual_inspector.picture`` is a parser of :mod:`tool_servers.shared.parser_pool`.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from tool_servers.shared.parser_pool import serve_parser

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
_JPEG_QUALITY = 90


class NoPictureError(Exception):
    """The bytes are not a usable picture; the message can be shown to the agent."""


@dataclass(frozen=True, slots=True)
class PreparedPicture:
    """A picture ready for the model.

    Attributes:
        width: Pixels of the original, upright.
        height: Pixels of the original, upright.
        kind: Format of the original, e.g. ``PNG``.
        media_type: Media type of ``body``: ``image/png`` or ``image/jpeg``.
        body: The re-encoded picture.
    """

    width: int
    height: int
    kind: str
    media_type: str
    body: bytes


def prepare(body: bytes, max_pixels: int, max_side: int) -> PreparedPicture:
    """Prepare the picture in ``body``; use the first frame of an animation.

    JPEGs stay JPEGs. All other formats become PNG, because JPEG degrades text and lines.

    Raises:
        NoPictureError: The format is not supported, or the picture is too large or damaged.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(body), formats=_FORMATS) as opened:
                kind = opened.format or ""
                upright = ImageOps.exif_transpose(opened)
    except UnidentifiedImageError:
        raise NoPictureError(
            f"the picture cannot be used: it is not a picture, or not one of: {', '.join(_FORMATS)}"
        ) from None
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise NoPictureError(f"the picture cannot be used: it has more than {max_pixels} pixels") from None
    except (OSError, SyntaxError, ValueError, EOFError):
        raise NoPictureError("the picture cannot be used: it is damaged or incomplete") from None
    width, height = upright.size
    upright.thumbnail((max_side, max_side))
    media_type, encoded = _encoded(upright, kind)
    return PreparedPicture(width, height, kind, media_type, encoded)


def _encoded(image: object, kind: str) -> tuple[str, bytes]:
    from PIL import Image

    assert isinstance(image, Image.Image)
    sink = io.BytesIO()
    clear = "A" in image.getbands() or "transparency" in image.info
    plain = image.convert("RGBA" if clear else "L" if image.mode in ("1", "L") else "RGB")
    if kind == "JPEG":
        plain.save(sink, "JPEG", quality=_JPEG_QUALITY)
        return "image/jpeg", sink.getvalue()
    plain.info.clear()
    plain.save(sink, "PNG")
    return "image/png", sink.getvalue()


def _parse(limits: dict[str, int], body: bytes) -> tuple[dict[str, object], bytes]:
    picture = prepare(body, **limits)
    about = {"width": picture.width, "height": picture.height, "kind": picture.kind}
    return about | {"media_type": picture.media_type}, picture.body


if __name__ == "__main__":
    serve_parser("picture", _parse, NoPictureError)
