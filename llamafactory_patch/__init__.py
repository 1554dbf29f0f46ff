"""Loss only on what the agent wrote, for stock LLaMA-Factory: this package tokenises the rows before the run.

``llamafactory-patch-cli train CONFIG.yaml`` accepts every option of ``llamafactory-cli`` and those of
:class:`llamafactory_patch.settings.SftSettings`. In Python, call :func:`llamafactory_patch.launcher.run_sft`.
"""
