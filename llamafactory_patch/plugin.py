"""Turn the running process's LLaMA-Factory into one that masks by author."""

from __future__ import annotations

from llamafactory_patch.compat import check_version, torchaudio_stub

_installed = False


def install() -> None:
    """Add the options of :mod:`llamafactory_patch.arguments` and the masking processors; safe to repeat.

    Raises:
        MissingExtraError: LLaMA-Factory is not installed.
        EngineError: Its version is not the supported one.
    """
    global _installed
    if _installed:
        return
    check_version()
    with torchaudio_stub():
        from llamafactory_patch.arguments import install_arguments
        from llamafactory_patch.processor import install_processor
    install_arguments()
    install_processor()
    _installed = True
