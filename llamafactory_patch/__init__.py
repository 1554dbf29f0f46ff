"""Loss only on what the agent wrote, for stock LLaMA-Factory: rows are tokenised before its own training reads them.

``llamafactory-patch-cli train CONFIG.yaml`` takes every option of ``llamafactory-cli`` and those of
:class:`llamafactory_patch.settings.SftSettings`. In Python, call :func:`llamafactory_patch.launcher.run_sft`.
"""
