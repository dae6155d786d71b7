"""Finds a checkpoint: a folder on disk, or a model of the Hugging Face hub."""

from pathlib import Path
from reprlib import repr as brief  # short

from engine.checkpoint.model_config import read_json
from engine.errors import ConfigError, MissingWeights, ModelNotFound

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
FETCHED = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]  # no code, no pickles
#: Second copies of the same weights, for their makers' own programs (Mistral, Llama, gpt-oss).
SECOND_COPIES = ["consolidated*", "original/*", "metal/*"]


def resolve_model(model: str) -> Path:
    """Return a model's folder, fetching a hub id; a path is never fetched. Raises ModelNotFound."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(
                f"{path} holds no config.json; give a folder in Hugging Face layout"
            )
        return path
    _refuse_path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=FETCHED, ignore_patterns=SECOND_COPIES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"{model!r} is no folder here, and the hub gave no such model ({type(error).__name__}: {error}); "
            "check the name, the network, and HF_TOKEN for gated models"
        ) from error


def _refuse_path(model: str) -> None:
    """Raise ModelNotFound if the name looks like a path, which cannot be a hub id."""
    if model.startswith(("/", ".", "~")) or model.count("/") > 1 or "\\" in model:
        raise ModelNotFound(
            f"there is no folder {model!r}; give an existing one or a hub id like 'Qwen/Qwen3-0.6B'"
        )


def find_here(model: str) -> Path | None:
    """Return a model's folder without fetching anything; None for a hub id whose model is not on this machine."""
    if Path(model).expanduser().is_dir():
        return resolve_model(model)
    _refuse_path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=FETCHED, local_files_only=True))
    except (OSError, ValueError):
        return None


def list_weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint. Raises MissingWeights, naming a missing shard."""
    if (folder / WHOLE).is_file():
        # As in transformers, this file is read even if there is an index: the other files are a second copy.
        return [folder / WHOLE]
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(_read_places(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise MissingWeights(
                f"{len(missing)} of {len(names)} weight shards named in {index} are missing: "
                f"{', '.join(missing)}; fetch them again"
            )
        return [folder / name for name in names]
    files = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if not files:
        raise MissingWeights(
            f"{folder} holds no .safetensors file; other weight formats are not read"
        )
    return files


def named_places(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file, as the index has it; {} without an index. Raises ConfigError."""
    if (folder / WHOLE).is_file() or not (folder / INDEX).is_file():
        return {}
    return _read_places(folder / INDEX)


def _read_places(index: Path) -> dict[str, str]:
    """Read from an index which file holds each tensor. Raises ConfigError if the index names a file elsewhere."""
    places: dict[str, str] = read_json(index).get("weight_map", {})
    names = list(places.values()) if isinstance(places, dict) else [places]
    for name in names:
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ConfigError(
                f"weight_map in {index} must name .safetensors files beside it, got {brief(name)}"
            )
    return places
