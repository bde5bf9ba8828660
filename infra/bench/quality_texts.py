"""Two English texts of different kinds out of Debian packages: Jane Austen's six novels, and the Debian handbook.

Both are free, large enough to calibrate and to judge on, and the same on every machine that has Debian's mirrors. Nothing
is installed: the packages are downloaded with `apt-get download` and unpacked with `dpkg-deb --extract`.
"""

import re
import struct
import subprocess
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

PASSAGE_CHARACTERS = 4000
"""Neighbouring paragraphs are put together to passages of at least this many characters: a document to calibrate on."""

_R_STRING = re.compile(rb"\x00\x04.\x09(.{4})", re.DOTALL)
"""Header of a CHARSXP (type 9) in R's XDR serialization: flags, then the length (-1 is NA)."""


class TextsError(RuntimeError):
    """The texts cannot be had; the message names the command that failed."""


def paragraphs(name: str, cache: Path) -> list[str]:
    """The paragraphs of "austen" or "handbook" in reading order; the package is fetched into `cache` once.

    Raises TextsError where apt-get or dpkg-deb fails.
    """
    package, read = TEXTS[name]
    return read(_unpacked(package, cache))


def split_middle(found: list[str], enough: Callable[[str], bool]) -> tuple[str, list[str]]:
    """(text to judge on, passages to calibrate on): paragraphs from the middle on until `enough`, and all the others.

    Raises TextsError where the second half is not enough.
    """
    half = sum(map(len, found)) // 2
    first, passed = 0, 0
    while passed < half:
        passed += len(found[first])
        first += 1
    last = first + 1
    while not enough(judged := "\n\n".join(found[first:last])):
        last += 1
        if last > len(found):
            raise TextsError(f"{len(found)} paragraphs hold too little text to judge on")
    return judged, [*_passages(found[:first]), *_passages(found[last:])]


def _passages(found: list[str]) -> list[str]:
    passages: list[str] = []
    current: list[str] = []
    for paragraph in found:
        current.append(paragraph)
        if sum(map(len, current)) >= PASSAGE_CHARACTERS:
            passages.append("\n\n".join(current))
            current = []
    return passages


def _unpacked(package: str, cache: Path) -> Path:
    folder = cache / package
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _call(["apt-get", "download", package], cache)
        archives = sorted(cache.glob(f"{package}_*.deb"))
        _call(["dpkg-deb", "--extract", str(archives[-1]), f"{folder}.part"], cache)
        Path(f"{folder}.part").rename(folder)
    return folder


def _call(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise TextsError(f"{command[0]} is missing: this benchmark takes its texts from Debian packages") from None
    except subprocess.CalledProcessError as error:
        raise TextsError(f"{' '.join(command)}: {error.stderr.strip()}") from None


def _austen(folder: Path) -> list[str]:
    """An R lazy-load database: records of a 4-byte length and a zlib stream; a novel is a vector of its lines."""
    data = next(folder.rglob("janeaustenr/data/Rdata.rdb")).read_bytes()
    found: list[str] = []
    position = 0
    while position < len(data):
        stream = zlib.decompressobj()
        raw = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        found += "\n".join(_r_strings(raw)).split("\n\n")
    return [paragraph.strip() for paragraph in found if paragraph.strip()]


def _r_strings(raw: bytes) -> list[str]:
    lines = []
    position = 0
    while header := _R_STRING.search(raw, position):
        (length,) = struct.unpack(">i", header[1])
        if 0 <= length <= len(raw) - header.end():
            position = header.end() + length
            lines.append(raw[header.end() : position].decode("utf-8"))
        else:
            position = header.start() + 1
    return lines


class _Paragraphs(HTMLParser):
    """Collects the prose of DocBook's HTML: <div class="para">, without listings."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open: list[bool] = []
        self._text: list[str] = []
        self._listing = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div":
            self._flush()
            self._open.append(dict(attrs).get("class") == "para")
        self._listing += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._open:
            self._flush()
            self._open.pop()
        self._listing -= tag == "pre"

    def handle_data(self, data: str) -> None:
        if not self._listing and self._open and self._open[-1]:
            self._text.append(data)

    def _flush(self) -> None:
        if text := " ".join("".join(self._text).split()):
            self.found.append(text)
        self._text = []


def _handbook(folder: Path) -> list[str]:
    found: list[str] = []
    for page in sorted(folder.rglob("html/en-US/*.html")):
        parser = _Paragraphs()
        parser.feed(page.read_text(encoding="utf-8"))
        found += parser.found
    return found


TEXTS: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "austen": ("r-cran-janeaustenr", _austen),
    "handbook": ("debian-handbook", _handbook),
}
"""Name -> (Debian package, what reads its unpacked folder)."""
