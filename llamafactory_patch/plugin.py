"""Turn the running process's LLaMA-Factory into one that masks by author."""

from __future__ import annotations

from llamafactory_patch.compat import check_version, end_at_last_step, restore_numbered_cpu, torchaudio_stub

_installed = False


def install() -> None:
    """Add our options, stages' checks, formats, chat template and masking processors; safe to repeat.

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
        from llamafactory_patch.conversations import install_template
        from llamafactory_patch.formats import install_formats
        from llamafactory_patch.loading import install_loading
        from llamafactory_patch.processor import install_batches, install_processor
        from llamafactory_patch.stored import install_stages
    for part in (install_arguments, install_stages, install_template, install_formats, install_loading):
        part()
    install_processor()
    install_batches()
    restore_numbered_cpu()
    end_at_last_step()
    _installed = True
