"""Make the loggers of a run. Each function takes the run folder and the current RL step, and makes
a Lightning logger. A run may have several loggers.

    logger=tensorboard    logger=[tensorboard,wandb]    logger=mlflow    logger=trackio
                          logger=none

metrics.jsonl is written with any choice of loggers. Further functions of this file log a text, a
table, a histogram, or the final metrics of a run.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rlkit.errors import ConfigError, install
from rlkit.system.contents import set_aside
from rlkit.system.files import LOST, explain_write_error, lose, read_regular, reason, write_atomic
from rlkit.system.identity import read_identity
from rlkit.types import plain, reaches, safe

# -------------------------------------------------------------------------------------- conf/logger


def tensorboard(run: Path, step: int, /) -> Any:
    """Write TensorBoard event files to tensorboard/. A resumed run continues in the same folder and
    hides everything after its checkpoint."""
    from lightning.pytorch.loggers import TensorBoardLogger

    purge = step + 1 if step else None
    return TensorBoardLogger(
        save_dir=str(run), name="", version="tensorboard", default_hp_metric=False, purge_step=purge
    )


@reaches(entity="address", mode="address")
@safe("project", "group", "tags", "job_type")
def wandb(
    run: Path,
    step: int,
    /,
    *,
    project: str = "rlkit",
    entity: str | None = None,
    mode: Literal["offline", "online", "disabled"] = "offline",
    group: str | None = None,
    tags: Sequence[str] = (),
    job_type: str = "train",
) -> Any:
    """Log to Weights & Biases, under the name of the run folder. A resumed run continues the same
    W&B run.

    Args:
      project, entity: where W&B stores the run. entity None: the account's own entity.
      group: W&B shows the runs of a group together. None: the name of the folder above the run
        folder; this is the name of the run or of the sweep.
      tags, job_type: labels for filtering runs.
      mode: "offline" keeps all data in wandb/ of the run folder until `wandb sync`. "online" sends
        all data immediately. "disabled" does nothing.
    Raises: ConfigError if the package is missing.
    """
    _require_package("wandb")
    from lightning.pytorch.loggers import WandbLogger

    known = read_id(run, "wandb.id")
    if known is None:
        known = secrets.token_hex(6)
        keep_id(run, "wandb.id", known)
    # an offline run is written in parts, and `wandb sync --append` joins them
    resume = "allow" if step and mode == "online" else None
    return WandbLogger(
        name=f"{run.parent.name}/{run.name}",
        save_dir=str(run),
        id=known,
        project=project,
        entity=entity,
        mode=mode,
        resume=resume,
        group=group or run.parent.name,
        tags=list(tags),
        job_type=job_type,
    )


@reaches(tracking_uri="address")
@safe("experiment")
def mlflow(
    run: Path, step: int, /, *, experiment: str = "rlkit", tracking_uri: str | None = None
) -> Any:
    """Log to MLflow, under the name of the run folder. A resumed run continues the same MLflow run.

    Args:
      experiment: MLflow's name for a set of runs.
      tracking_uri: address of the MLflow server. None: $MLFLOW_TRACKING_URI if it is set, otherwise
        the folder mlruns/ of the working folder. `mlflow ui --backend-store-uri mlruns` shows this
        folder.
    Raises: ConfigError if the package is missing.
    """
    _require_package("mlflow")
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        uri = Path("mlruns").absolute().as_uri()
        # MLflow 3 refuses to store runs in files unless this variable allows it
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    from lightning.pytorch.loggers import MLFlowLogger

    known = read_id(run, "mlflow.id")
    logger = MLFlowLogger(
        experiment_name=experiment,
        run_name=f"{run.parent.name}/{run.name}",
        tracking_uri=uri,
        run_id=known,
    )
    keep_id(run, "mlflow.id", str(logger.run_id))
    return logger


@reaches(space="address")
@safe("project")
def trackio(run: Path, step: int, /, *, project: str = "rlkit", space: str | None = None) -> Any:
    """Log to Trackio, under the name of the run folder. A resumed run continues the same Trackio
    run. `trackio show` opens the dashboard.

    Args:
      project: Trackio shows the runs of a project together.
      space: a Hugging Face Space, as OWNER/NAME, to show the runs to others. None keeps all data on
        this machine, in $TRACKIO_DIR.
    Raises: ConfigError if the package is missing.
    """
    _require_package("trackio")
    import trackio as package
    from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

    class Trackio(Logger):
        """A Trackio run that starts at its first use."""

        name = property(lambda self: project)
        version = property(lambda self: run.name)
        run = None
        histogram = staticmethod(package.Histogram)

        @property
        @rank_zero_experiment
        def experiment(self) -> Any:
            if self.run is None:
                self.run = package.init(
                    project=project,
                    name=f"{run.parent.name}/{run.name}",
                    space_id=space,
                    group=run.parent.name,
                    resume="allow" if step else "never",
                    embed=False,
                )
            return self.run

        def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
            self.experiment.log(dict(metrics), step=step)

        def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None:
            self.experiment.config.update(params)  # sent with the first metrics

        def log_table(
            self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int
        ) -> None:
            table = package.Table(columns=list(columns), data=[list(row) for row in data])
            self.log_metrics({key: table}, step)

        log_text = log_table

        def finalize(self, status: str) -> None:
            if self.run is not None:
                self.run.finish()

    return Trackio()


def read_id(run: Path, name: str) -> str | None:
    """Return the id given to this run by a logger's service. `keep_id` has written this id to the
    file `name` in the run folder. Return None if the file has no id of this run.

    A file of another run, or a damaged file, is moved to aside/. Therefore this run does not write
    into the other run's page.
    """
    if not (run / name).exists():
        return None
    words = read_regular(run / name).decode(errors="replace").split()
    if len(words) == 2 and words[1] == f"run={read_identity(run)}":
        return words[0]
    kept = set_aside(run, name)
    print(
        f"resume: {name} is not what this run wrote, and is kept as {kept}; the logger begins a"
        " new run",
        flush=True,
    )
    return None


def keep_id(run: Path, name: str, known: str) -> None:
    """Save the id given to this run by a logger's service. The file `name` in the run folder gets
    the id (`known`), followed by the run's identity in rlkit (`read_identity`)."""
    write_atomic(run / name, f"{known} run={read_identity(run)}\n".encode())


def check_loggers(loggers: Mapping[str, Callable[..., Any]]) -> None:
    """Raise ConfigError if the package of a logger is missing. This check comes before the model is
    loaded; the loggers are made afterwards."""
    for make in loggers.values():
        function = plain(make)
        if function in (wandb, mlflow, trackio):
            _require_package(function.__name__)


def _require_package(package: str) -> None:
    """Raise ConfigError if the package of a logger is missing. A package and its logger have the
    same name."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"logger={package}: the package {package} is not installed; {install(package)}, or"
            " leave it out"
        )


# ------------------------------------------------------------------------------ a logger that fails

# methods of a logger that Lightning or rlkit calls
CALLS = (
    "log_metrics",
    "log_hyperparams",
    "log_graph",
    "save",
    "finalize",
    "after_save_checkpoint",
)


def make_tolerant(logger: Any) -> Any:
    """Change a logger so that its methods report a failure instead of raising an error, and return
    the logger. A failure is, for example, a full disk, an absent server or an error of the
    package."""
    for name in CALLS:
        if hasattr(logger, name):
            setattr(logger, name, report_logger_failure(logger)(getattr(logger, name)))
    if not hasattr(threading.excepthook, "before"):
        hook = partial(_report_thread_failure, threading.excepthook)
        hook.before = threading.excepthook  # type: ignore[attr-defined]
        threading.excepthook = hook
    return logger


def _report_thread_failure(before: Callable[..., Any], args: Any) -> None:
    """Print the traceback of a failed thread, with one exception. If the thread failed because it
    could not write, the logger's next call reports this failure."""
    if args.exc_value is None or explain_write_error(args.exc_value) is None:
        before(args)


@contextmanager
def report_logger_failure(logger: Any) -> Iterator[None]:
    """Return a context manager for calls of a logger. If a call fails, report the failure once for
    each logger, and continue. No metric is lost, because metrics.jsonl holds all metrics."""
    try:
        yield
    except Exception as error:
        name = type(logger).__name__
        if name not in LOST:
            why = explain_write_error(error) or f"{type(error).__name__}: {reason(error)}"
            lose(f"a part of the data for {name} is", why, name)
        if hasattr(logger, "_experiment") and hasattr(logger, "log_dir"):
            # TensorBoard's writer stops at its first failure; the next call opens another file
            logger._experiment = None


# --------------------------------------------------------------------- texts, tables and histograms


# A logger is recognised by its methods. W&B and Trackio have `log_table`, and Trackio also has
# `histogram`. W&B, Trackio and MLflow have `log_text`; MLflow has it in its client.


def _is_tensorboard(logger: Any) -> bool:
    return hasattr(logger.experiment, "add_hparams")


def log_text(logger: Any, name: str, text: str, step: int) -> None:
    """Log a text of a step: as a TensorBoard text, a W&B or Trackio table, or an MLflow artifact.
    Other loggers do not get the text."""
    with report_logger_failure(logger):
        if _is_tensorboard(logger):
            logger.experiment.add_text(name, text, global_step=step)
        elif hasattr(logger, "log_text"):
            logger.log_text(key=name, columns=["step", "text"], data=[[step, text]], step=step)
        elif hasattr(logger.experiment, "log_text"):
            logger.experiment.log_text(logger.run_id, text, f"{name}/step_{step:06d}.txt")


def log_table(
    logger: Any, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
) -> None:
    """Log rows of a step as a table that W&B and Trackio can sort and filter. Other loggers do not
    get the table."""
    if hasattr(logger, "log_table"):
        with report_logger_failure(logger):
            logger.log_table(name, columns=list(columns), data=list(rows), step=step)


def log_histogram(logger: Any, name: str, values: Sequence[float], step: int) -> None:
    """Log a histogram of a step's values to TensorBoard, W&B or Trackio. Other loggers cannot show
    histograms and do not get them."""
    if not values:
        return
    with report_logger_failure(logger):
        if _is_tensorboard(logger):
            import numpy as np

            logger.experiment.add_histogram(name, np.asarray(values), global_step=step)
        elif hasattr(logger, "histogram"):
            logger.log_metrics({name: logger.histogram(list(values))}, step=step)
        elif hasattr(logger, "log_table"):  # W&B
            from wandb import Histogram  # type: ignore[attr-defined, unused-ignore]

            logger.log_metrics({name: Histogram(list(values))}, step=step)


def log_settings(logger: Any, settings: Mapping[str, Any]) -> None:
    """Log the settings of a run at its start. TensorBoard gets the settings at the end, together
    with the final metrics, because its table of runs needs both at once."""
    with report_logger_failure(logger):
        if not _is_tensorboard(logger):
            logger.log_hyperparams(dict(settings))


def log_final(
    logger: Any, settings: Mapping[str, Any], figures: Mapping[str, float], step: int
) -> None:
    """Log the final metrics of a run, for comparing the runs of a sweep. They are written to
    TensorBoard's hparams, W&B's summary, or MLflow's metrics."""
    named: dict[str, Any] = {f"final/{name}": value for name, value in figures.items()}
    with report_logger_failure(logger):
        if _is_tensorboard(logger):
            plain = {
                k: v if isinstance(v, bool | int | float | str) else str(v)
                for k, v in settings.items()
            }
            logger.log_hyperparams(plain, named, step=step)
        else:
            logger.log_metrics(named, step=step)
