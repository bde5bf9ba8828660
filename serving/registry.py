"""The model registry: MLflow holds names, versions, figures and aliases; the weights lie in the artifact store.

This is the only module that talks to MLflow. A version is known by its checkpoint digest: registering one digest twice,
from any number of threads and processes, gives one version. MLflow is imported at the first use, since that takes
seconds.
"""

import contextlib
import fcntl
import functools
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["passed", "rejected", "unjudged"]

TAG = "narrowgauge."
EXPERIMENT = "narrowgauge"
CANDIDATE = "candidate"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_GLOBALS = threading.RLock()  # mlflow keeps the tracking URI in a global, and we visit it


class RegistryError(ValueError):
    """What the registry refused or lacks; the message names the model, the version and what to do."""


@dataclass(frozen=True, kw_only=True)
class ModelVersion:
    """One entry: `uri` says where the checkpoint lies, `digest` which bytes it must have."""

    name: str
    version: int
    digest: str
    uri: str
    verdict: str
    scheme: str | None
    aliases: tuple[str, ...]
    tags: dict[str, str]
    run_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class RegisterRequest:
    """What to register: the checkpoint, the gate's verdict on it ("unjudged" where none was asked) and its evidence.

    `metrics` and `params` go to the run of the version, `texts` are its files (path -> text) and `tables` become
    JSON tables (path -> column -> values).
    """

    name: str
    digest: str
    uri: str
    verdict: Verdict = "unjudged"
    scheme: str | None = None
    recipe_digest: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Sequence[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name(self.name)

    @property
    def tags(self) -> dict[str, str]:
        """The tags of the version, with their full names."""
        values = {
            "digest": self.digest,
            "uri": self.uri,
            "recipe_digest": self.recipe_digest,
            "scheme": self.scheme,
            "verdict": None if self.verdict == "unjudged" else self.verdict,
        }
        return {TAG + key: value for key, value in values.items() if value}


class Registry:
    """Names and versions of models, kept in MLflow. Cheap to make; connects at the first call."""

    def __init__(self, tracking_uri: str, *, home: Path) -> None:
        self._uri = tracking_uri
        self._home = home
        self._connected: Any = None

    def register(self, request: RegisterRequest) -> ModelVersion:
        """The version of this digest, made where there is none yet; `candidate` moves to it only if it passed.

        A digest that is registered again with another verdict or recipe keeps its version number and gets the new
        tags and a new run with the new figures; one rejected now loses `candidate`.
        """
        with self._client() as client:
            found = self._find(client, request.name, request.digest)
            if found is None:
                found = self._create(client, request)
            elif any(found.tags.get(key) != value for key, value in request.tags.items()):
                run_id = self._log_run(client, request)
                for key, value in {**request.tags, TAG + "run": run_id}.items():
                    client.set_model_version_tag(request.name, str(found.version), key, value)
            if request.verdict == "passed":
                client.set_registered_model_alias(request.name, CANDIDATE, str(found.version))
            elif request.verdict == "rejected" and CANDIDATE in found.aliases:
                client.delete_registered_model_alias(request.name, CANDIDATE)
            return self._version(client, request.name, found.version)

    def by_alias(self, name: str, alias: str) -> ModelVersion | None:
        """The version that carries the alias, or None (also for an unknown model)."""
        with self._client() as client:
            number = self._aliases(client, name).get(alias)
            return None if number is None else self._version(client, name, number)

    def by_version(self, name: str, version: int) -> ModelVersion | None:
        """That version, or None."""
        with self._client() as client:
            return self._version_or_none(client, name, version)

    def by_digest(self, name: str, digest: str) -> ModelVersion | None:
        """The version of that checkpoint digest, or None."""
        with self._client() as client:
            return self._find(client, name, digest)

    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """All versions of a model, oldest first."""
        with self._client() as client:
            return tuple(self._search(client, f"name = '{check_name(name)}'"))

    def models(self) -> tuple[str, ...]:
        """The names of all registered models, sorted."""
        with self._client() as client:
            return tuple(sorted(model.name for model in _pages(client.search_registered_models)))

    def resolve(self, uri: str) -> ModelVersion:
        """The version that models:/NAME@ALIAS or models:/NAME/VERSION names. Raises RegistryError where there is none."""
        match = re.fullmatch(r"models:/+([^/@]+)(?:@([^/@]+)|/([0-9]+))", uri)
        if match is None:
            raise RegistryError(f"{uri}: write models:/NAME@ALIAS or models:/NAME/VERSION")
        name, alias, number = match.groups()
        found = self.by_alias(name, alias) if alias else self.by_version(name, int(number))
        if found is not None:
            return found
        if name not in self.models():
            raise RegistryError(f"{uri}: no model '{name}' is registered; `narrowgauge list` shows those that are")
        what = f"alias '{alias}'" if alias else f"version {number}"
        raise RegistryError(f"{uri}: model '{name}' has no {what}; `narrowgauge show {name}` lists what it has")

    def set_alias(self, name: str, alias: str, version: int) -> None:
        """Moves an alias to a version. Raises RegistryError for a version that does not exist."""
        with self._client() as client:
            client.set_registered_model_alias(name, alias, str(version))

    def set_tag(self, name: str, version: int, *, key: str, value: str) -> None:
        """Sets one tag of a version; `key` is the full name ("narrowgauge.rollout")."""
        with self._client() as client:
            client.set_model_version_tag(name, str(version), key, value)

    def metrics(self, version: ModelVersion) -> dict[str, float]:
        """The figures that the version was registered with (its latest run)."""
        if version.run_id is None:
            return {}
        with self._client() as client:
            return dict(client.get_run(version.run_id).data.metrics)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Any]:
        """The MLflow client, alone with the database when that is SQLite: its migrations and writers race."""
        mlflow = _import_mlflow()
        with _GLOBALS, self._sqlite_lock(), _tracking_uri(mlflow, self._uri):
            try:
                if self._connected is None:
                    self._connected = mlflow.MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
                yield self._connected
            except mlflow.exceptions.MlflowException as error:
                raise RegistryError(f"MLflow at {_without_password(self._uri)}: {_first_line(error)}") from error

    @contextlib.contextmanager
    def _sqlite_lock(self) -> Iterator[None]:
        if not self._uri.startswith("sqlite:"):
            yield
            return
        if (path := self._uri.removeprefix("sqlite:///")) != self._uri and path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        locks = self._home / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / "mlflow.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _create(self, client: Any, request: RegisterRequest) -> ModelVersion:
        mlflow = _import_mlflow()
        self._ensure_model(client, request.name)
        run_id = self._log_run(client, request)
        # An external model: its dummy MLmodel file aside, MLflow stores nothing; the weights stay in the artifact store.
        external = mlflow.create_external_model(
            name=request.name,
            source_run_id=run_id,
            tags=request.tags,
            experiment_id=self._experiment(client),
        )
        created = client.create_model_version(
            name=request.name,
            source=f"models:/{external.model_id}",
            run_id=run_id,
            tags={**request.tags, TAG + "run": run_id},
            model_id=external.model_id,
        )
        # Without SQLite's lock another machine may have registered the digest meanwhile: the lowest number stays.
        found = self._find(client, request.name, request.digest)
        if found is not None and found.version < int(created.version):
            client.delete_model_version(request.name, created.version)
            return found
        return self._version(client, request.name, int(created.version))

    def _ensure_model(self, client: Any, name: str) -> None:
        exceptions = _import_mlflow().exceptions
        try:
            client.create_registered_model(name)
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def _experiment(self, client: Any) -> str:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        # A tracking server decides itself; for a database MLflow would take ./mlruns of the current folder.
        remote = self._uri.startswith(("http://", "https://"))
        location = None if remote else (self._home / "mlflow" / "artifacts").absolute().as_uri()
        return str(client.create_experiment(EXPERIMENT, artifact_location=location))

    def _log_run(self, client: Any, request: RegisterRequest) -> str:
        entities = _import_mlflow().entities
        run = client.create_run(
            self._experiment(client), run_name=f"{request.name}-{request.digest[:12]}", tags=dict(request.tags)
        )
        run_id = str(run.info.run_id)
        now_ms = run.info.start_time
        client.log_batch(
            run_id,
            metrics=[entities.Metric(key, float(value), now_ms, 0) for key, value in request.metrics.items()],
            params=[entities.Param(key, value) for key, value in request.params.items()],
        )
        for path, text in request.texts.items():
            client.log_text(run_id, text, path)
        for path, columns in request.tables.items():
            client.log_dict(run_id, _split_table(columns), path)
        if request.tables:  # how MLflow's pages find tables
            listing = json.dumps([{"path": path, "type": "table"} for path in request.tables])
            client.set_tag(run_id, "mlflow.loggedArtifacts", listing)
        client.set_terminated(run_id)
        return run_id

    def _find(self, client: Any, name: str, digest: str) -> ModelVersion | None:
        found = self._search(client, f"name = '{check_name(name)}' and tags.`{TAG}digest` = '{digest}'")
        return min(found, key=lambda version: version.version, default=None)

    def _search(self, client: Any, query: str) -> list[ModelVersion]:
        rows = list(_pages(functools.partial(client.search_model_versions, query)))
        aliases = {name: self._aliases(client, name) for name in {row.name for row in rows}}
        return sorted((_convert(row, aliases[row.name]) for row in rows), key=lambda version: version.version)

    def _version(self, client: Any, name: str, version: int) -> ModelVersion:
        return _convert(client.get_model_version(name, str(version)), self._aliases(client, name))

    def _version_or_none(self, client: Any, name: str, version: int) -> ModelVersion | None:
        with _absent_is_none():
            return self._version(client, name, version)
        return None

    def _aliases(self, client: Any, name: str) -> dict[str, int]:
        """alias -> version. MLflow leaves aliases out of search results, so they are asked of the model."""
        with _absent_is_none():
            return {alias: int(version) for alias, version in client.get_registered_model(name).aliases.items()}
        return {}


def check_name(name: str) -> str:
    """A model name that is safe in URIs, queries and file names, or RegistryError."""
    if not _NAME.fullmatch(name):
        raise RegistryError(
            f"model name {name!r}: use letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    return name


def _split_table(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """What `log_table` writes (pandas' "split" layout); its own detour through pandas 3 warns."""
    return {"columns": list(columns), "data": [list(row) for row in zip(*columns.values(), strict=True)]}


def _convert(row: Any, aliases: Mapping[str, int]) -> ModelVersion:
    tags = dict(row.tags)
    number = int(row.version)
    return ModelVersion(
        name=row.name,
        version=number,
        digest=tags.get(TAG + "digest", ""),
        uri=tags.get(TAG + "uri", ""),
        verdict=tags.get(TAG + "verdict", "unjudged"),
        scheme=tags.get(TAG + "scheme"),
        aliases=tuple(sorted(alias for alias, version in aliases.items() if version == number)),
        tags=tags,
        run_id=tags.get(TAG + "run") or row.run_id or None,
    )


@functools.cache
def _import_mlflow() -> Any:
    # Both are read at import; with telemetry MLflow would write in HOME.
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    import mlflow

    return mlflow


@contextlib.contextmanager
def _tracking_uri(mlflow: Any, uri: str) -> Iterator[None]:
    """Points mlflow's global at our registry for one call; it also sets a variable, which our children must not get."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    mlflow.set_tracking_uri(uri)
    _restore("MLFLOW_TRACKING_URI", before)
    yield


def _restore(variable: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = value


@contextlib.contextmanager
def _absent_is_none() -> Iterator[None]:
    exceptions = _import_mlflow().exceptions
    try:
        yield
    except exceptions.MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def _pages(search: Any) -> Iterator[Any]:
    page = search()
    while True:
        yield from page
        if not page.token:
            return
        page = search(page_token=page.token)


def _without_password(uri: str) -> str:
    return re.sub(r"//[^@/]*@", "//***@", uri)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
