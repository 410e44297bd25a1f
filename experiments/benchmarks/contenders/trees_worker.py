"""A library of boosted trees in a process of its own: answers requests, JSON lines, with times and a metric."""

import json
import os
import sys
import time

import numpy as np

THREADS = os.cpu_count() or 1


def make_model(library, task, categorical, settings):
    """Returns an estimator with ``fit`` and ``predict`` or ``predict_proba``."""
    trees, depth, rate, l2, least = (settings[name] for name in ("trees", "depth", "rate", "l2", "least"))
    leaves = 2**depth
    if library == "jaxnn":
        from jaxnn import trees as ours

        kind = ours.GradientBoostingRegressor if task == "regression" else ours.GradientBoostingClassifier
        return kind(
            num_trees=trees, max_depth=depth, learning_rate=rate, l2=l2, min_child_weight=least, categorical=categorical
        )
    if library == "lightgbm":
        import lightgbm

        kind = lightgbm.LGBMRegressor if task == "regression" else lightgbm.LGBMClassifier
        given = {"n_estimators": trees, "max_depth": depth, "num_leaves": leaves, "learning_rate": rate}
        return kind(**given, reg_lambda=l2, min_child_weight=least, min_child_samples=1, n_jobs=THREADS, verbose=-1)
    if library == "xgboost":
        import xgboost

        kind = xgboost.XGBRegressor if task == "regression" else xgboost.XGBClassifier
        types = ["c" if column in categorical else "q" for column in range(settings["columns"])]
        given = {"n_estimators": trees, "max_depth": depth, "learning_rate": rate, "reg_lambda": l2}
        how = {"tree_method": "hist", "max_bin": 255, "n_jobs": THREADS}
        return kind(**given, min_child_weight=least, **how, feature_types=types, enable_categorical=True)
    if library == "sklearn":
        from sklearn import ensemble

        kind = getattr(ensemble, f"HistGradientBoosting{'Regressor' if task == 'regression' else 'Classifier'}")
        given = {"max_iter": trees, "max_depth": depth, "max_leaf_nodes": leaves, "learning_rate": rate}
        how = {"early_stopping": False, "categorical_features": list(categorical) or None}
        return kind(**given, l2_regularization=l2, min_samples_leaf=1, **how)
    import catboost

    kind = catboost.CatBoostRegressor if task == "regression" else catboost.CatBoostClassifier
    given = {"iterations": trees, "depth": depth, "learning_rate": rate, "l2_leaf_reg": l2}
    how = {"thread_count": THREADS, "verbose": False, "allow_writing_files": False, "border_count": 254}
    return kind(**given, **how, cat_features=list(categorical))


def fit(library, path, settings):
    """Trains on one table, and returns seconds of training and prediction, and RMSE or log loss of the test rows."""
    with np.load(path) as file:
        data = dict(file)
    task, categorical = str(data["task"]), tuple(data["categorical"].tolist())
    train, test = data["train"], data["test"]
    if library == "lightgbm":
        extra = {"categorical_feature": list(categorical)}
    else:
        extra = {}
    if library == "catboost" and categorical:  # categories as texts, in tables of objects
        train, test = ([tuple(_texts(row, categorical)) for row in part] for part in (train, test))
    model = make_model(library, task, categorical, settings | {"columns": data["train"].shape[1]})
    start = time.perf_counter()
    model.fit(train, data["train_targets"], **extra)
    trained = time.perf_counter()
    predict = model.predict if task == "regression" else model.predict_proba
    found = np.asarray(predict(test))
    seconds = []
    for _ in range(3):  # the first call may have compiled
        again = time.perf_counter()
        predict(test)
        seconds.append(time.perf_counter() - again)
    targets = data["test_targets"]
    if task == "regression":
        metric = float(np.sqrt(np.mean((found - targets) ** 2)))
    else:
        metric = float(-np.log(np.clip(found[np.arange(len(targets)), targets], 1e-12, 1)).mean())
    return {"fit": trained - start, "predict": min(seconds), "metric": metric}


def _texts(row, categorical):
    return [str(x) if column in categorical else x for column, x in enumerate(row.tolist())]


def population(library, path, settings):
    """Trains 64 models, 16 learning rates by 4 penalties, and returns the seconds."""
    with np.load(path) as file:
        inputs, targets = file["train"], file["train_targets"]
    rates, penalties = np.linspace(0.02, 0.3, 16).tolist(), [0.1, 1.0, 10.0, 100.0]
    start = time.perf_counter()
    if library == "jaxnn":
        _sweep(inputs, targets, rates, penalties, settings)
    else:
        for rate in rates:
            for l2 in penalties:
                model = make_model(library, "regression", (), settings | {"rate": rate, "l2": l2})
                model.set_params(n_jobs=settings["threads"]).fit(inputs, targets)
    return {"seconds": time.perf_counter() - start}


def _sweep(inputs, targets, rates, penalties, settings):
    import dataclasses
    import tempfile

    import jax

    import jaxnn as jn

    @dataclasses.dataclass(frozen=True)
    class Config:
        learning_rate: float = 0.1
        l2: float = 1.0
        batch_size: int = len(targets)
        num_steps: int = settings["trees"]
        seed: int = 0

    def booster(config):
        given = {"learning_rate": config.learning_rate, "l2": config.l2, "min_child_weight": settings["least"]}
        return jn.trees.boosting(
            jn.trees.squared_error(), num_trees=config.num_steps, max_depth=settings["depth"], **given
        )

    splits = jn.data.binned((inputs, targets.astype(np.float32)))
    experiment = jn.trees.experiment(Config(), lambda config: splits, booster)
    with tempfile.TemporaryDirectory() as folder:
        how = {"devices": len(jax.devices()), "progress": "none"}
        how |= dict.fromkeys(("report_every", "eval_every"), settings["trees"])
        jn.sweep(experiment, jn.grid(learning_rate=rates, l2=penalties), run_dir=f"{folder}/sweep", **how)


def version(library):
    """Returns the library's version."""
    import importlib.metadata

    return {"version": importlib.metadata.version("scikit-learn" if library == "sklearn" else library)}


def main(library):
    """Answers the requests on standard input."""
    if library == "jaxnn":
        import jax

        jax.config.update("jax_num_cpu_devices", THREADS)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = globals()[request.pop("command")](library, **request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
