"""Reading a GGUF file: fields, tensors, and the tokenizer of its vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from afm.errors import ConfigError, MissingExtraError

_ARCHITECTURES = ("llama", "qwen2", "qwen3")


class TokenType(IntEnum):
    """Type of a token in a GGUF file. Its other types are bytes and unknown words, which byte-level BPE lacks."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


class GgufFile:
    """An open GGUF file with its fields and tensors.

    Raises:
        ConfigError: The file is not a GGUF file, or has another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError:
            raise MissingExtraError("gguf", "gguf") from None
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; expected a GGUF file")
        try:
            self._reader = GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
            why = _why_unreadable(path, error)
            raise ConfigError(
                f"{path}: not a readable GGUF file: {why}; download or convert it again"
            ) from None
        self.architecture = str(self.field("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise self.fault(f"architecture {self.architecture!r}, expected {', '.join(_ARCHITECTURES)}")

    def fault(self, text: str) -> ConfigError:
        """Return an error with the file and the general next step."""
        return ConfigError(f"{self.path}: {text}; use the model's Hugging Face folder instead")

    def field(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key``.

        Raises:
            ConfigError: Its text is damaged, or the file lacks the key and there is no default.
        """
        field = self._reader.get_field(key)
        if field is not None:
            try:
                return field.contents()
            except UnicodeDecodeError:
                raise self.fault(f"{key} is not UTF-8 text, so the file is damaged") from None
        if default is None:
            raise self.fault(f"{key} is missing")
        return default

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of ``key`` below the architecture's name."""
        return self.field(f"{self.architecture}.{key}", default)

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of ids."""
        return list(self.field("tokenizer.ggml.tokens"))

    @cached_property
    def token_types(self) -> list[int]:
        """Type of each token."""
        types = list(self.field("tokenizer.ggml.token_type"))
        if len(types) != len(self.tokens):
            raise self.fault(f"{len(self.tokens)} tokens, but {len(types)} token types")
        return types

    def token(self, name: str) -> str | None:
        """Return the file's ``bos``, ``eos`` or ``padding`` token."""
        number = int(self.field(f"tokenizer.ggml.{name}_token_id", -1))
        if number >= len(self.tokens):
            raise self.fault(f"{name} token {number} of {len(self.tokens)}")
        return self.tokens[number] if number >= 0 else None

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a turn or a message."""
        ids = (int(self.field(f"tokenizer.ggml.{name}_token_id", -1)) for name in ("eos", "eot", "eom"))
        return [number for number in ids if number >= 0]

    @property
    def tensors(self) -> dict[str, Any]:
        """Tensors by name."""
        return {tensor.name: tensor for tensor in self._reader.tensors}

    def read(self, tensor: Any) -> Any:
        """Read the values of a tensor: bfloat16 as stored, all other types as float32."""
        import torch
        from gguf import GGMLQuantizationType, dequantize

        if tensor.tensor_type == GGMLQuantizationType.BF16:
            shape = [int(size) for size in reversed(tensor.shape)]
            return torch.from_numpy(tensor.data.copy()).view(torch.bfloat16).reshape(shape)
        try:
            return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        except NotImplementedError as error:
            raise self.fault(f"{tensor.name}: {error}") from None


def _why_unreadable(path: Path, error: Exception) -> str:
    """Say what is wrong with a file; the words of the reading library are those of arrays."""
    with path.open("rb") as file:
        head = file.read(8)
    if isinstance(error, OSError):
        return str(error)
    if not head.startswith(b"GGUF"):
        return f"it begins with {head!r}, expected b'GGUF'"
    if "version" in str(error):
        return f"version {int.from_bytes(head[4:], 'little')}, expected 2 or 3"
    return f"its contents do not fit its {path.stat().st_size:,} bytes, so it is damaged or cut off"


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


_SAMPLED_TOKENS = 2_000
_LEAST_WHOLE = 0.95
"""Minimum share of tokens that encode to themselves. SmolLM2 and Qwen2.5 reach 0.99."""


@dataclass(frozen=True, slots=True)
class _WordSplit:
    """How a tokenizer splits text into words before it merges bytes.

    Attributes:
        pattern: Pattern of words. Empty for that of GPT-2.
        single_digits: Whether each digit is a separate word.
        whole_words: Whether a word that is a token is used without merges.
        nfc: Whether texts are first normalised to Unicode's composed form.
    """

    pattern: str = ""
    single_digits: bool = False
    whole_words: bool = False
    nfc: bool = False


_QWEN = _WordSplit(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_LLAMA_3 = _WordSplit(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True)
_WORD_SPLITS = {
    "gpt-2": _WordSplit(),
    "smollm": _WordSplit(single_digits=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
}

CHECKED_TEXTS = (
    "Tom has 57 coins. Tom finds 1,038 more. How many coins does Tom have?",
    "<b>x</b><pre>\n```py\nprint(57 + 1038)\n```\n</pre>\n<output>\n1095\n</output>",
    "  two  spaces,\ttabs,\r\n\r\nlines \n and a blank at the end ",
    "It's Zoë's naïve café: 3.14 × 10⁻² € — “quoted”, 東京, Привет, عربى, 🤖👩\u200d🔬",
    r"\boxed{\frac{1}{2}} don't WE'LL x_1 = y**2 # a-b/c",
)


def build_tokenizer(file: GgufFile) -> Any:
    """Build a fast tokenizer from the file's vocabulary, merges, special tokens and chat template."""
    from tokenizers import AddedToken, Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    kind, split = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise file.fault(f"a tokenizer of the kind {kind!r}, expected byte-level BPE ('gpt2')")
    if split not in _WORD_SPLITS:
        raise file.fault(f"words are split as in {split!r}, expected one of {', '.join(_WORD_SPLITS)}")
    words = _WORD_SPLITS[split]
    used = [
        (token, number, kind)
        for number, (token, kind) in enumerate(zip(file.tokens, file.token_types, strict=True))
        if kind != TokenType.UNUSED
    ]
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges")]
    try:
        bpe = models.BPE(
            vocab={token: number for token, number, _ in used},
            merges=merges,
            ignore_merges=words.whole_words,
        )
    except Exception as error:  # noqa: BLE001  # tokenizers raises no other class
        raise file.fault(f"vocabulary and merges do not fit: {error}") from None
    backend = Tokenizer(bpe)
    _set_word_split(backend, words)
    start = file.token("bos")
    if start and file.field("tokenizer.ggml.add_bos_token", default=False):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{start} $A",
            pair=f"{start} $A {start} $B",
            special_tokens=[(start, file.tokens.index(start))],
        )
    backend.add_tokens(
        [
            AddedToken(token, special=kind == TokenType.CONTROL, normalized=False)
            for token, _, kind in used
            if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        ]
    )
    end = file.token("eos")
    if end is None:
        raise file.fault("it names no end token")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=start,
        eos_token=end,
        pad_token=file.token("padding") or end,
        model_max_length=file.setting("context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=file.field("tokenizer.chat_template", "") or None,
    )


def _set_word_split(backend: Any, words: _WordSplit) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    if words.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.single_digits else []
    if words.pattern:
        steps.append(pre_tokenizers.Split(Regex(words.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()


def check_tokenizer(folder: Path, built: Any, file: GgufFile) -> None:
    """Compare the tokenizer that a folder loads with the one that was built for it.

    Raises:
        ConfigError: A text changes, a special token is split, or the vocabulary does not fit the merges.
    """
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    template = str(file.field("tokenizer.chat_template", ""))
    for text in (*CHECKED_TEXTS, template):
        ids = loaded.encode(text, add_special_tokens=False)
        if ids != built.encode(text, add_special_tokens=False):
            raise file.fault(f"its tokenizer encodes {text[:40]!r} otherwise once it is saved")
        if (back := loaded.decode(ids, clean_up_tokenization_spaces=False)) != _normalised(built, text):
            raise file.fault(f"its tokenizer turns {text[:40]!r} into {back[:40]!r}")
    typed = list(enumerate(zip(file.tokens, file.token_types, strict=True)))
    for number, (token, kind) in typed:
        is_special = kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        if is_special and loaded.encode(token, add_special_tokens=False) != [number]:
            raise file.fault(f"its tokenizer cuts the special token {token!r}")
    _check_merges(loaded, [number for number, (_, kind) in typed if kind == TokenType.NORMAL], file)


def _normalised(tokenizer: Any, text: str) -> str:
    """Return the text in the tokenizer's normal form."""
    normalizer = tokenizer.backend_tokenizer.normalizer
    return str(normalizer.normalize_str(text)) if normalizer else text


def _check_merges(tokenizer: Any, normal: Sequence[int], file: GgufFile) -> None:
    """Check that the tokens of the vocabulary encode to themselves, as in a BPE with rare exceptions."""
    sample = normal[:: max(1, len(normal) // _SAMPLED_TOKENS)]
    texts = [(number, tokenizer.decode([number])) for number in sample]
    whole = [(number, text) for number, text in texts if "\ufffd" not in text]
    same = sum(tokenizer.encode(text, add_special_tokens=False) == [number] for number, text in whole)
    if same < _LEAST_WHOLE * len(whole):
        raise file.fault(
            f"only {same} of {len(whole)} tokens encode to themselves: vocabulary, merges and "
            f"{file.field('tokenizer.ggml.pre', 'gpt-2')!r} do not belong together"
        )
