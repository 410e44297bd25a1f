"""Whether more or less of a metric is better: stated by a task, or known by the whole name of a common metric."""

import re
from collections.abc import Mapping

from jaxnn.types import ConfigError, Direction

# Without the split, and without the number of `top_5_accuracy` or `ndcg@10`.
_LESS = """
loss error error_rate perplexity bits_per_token bits_per_character bits_per_byte bits_per_dim nll cross_entropy log_loss
mae mse rmse mape smape rmsle msle mean_absolute_error mean_squared_error root_mean_squared_error max_error
mean_absolute_percentage_error median_absolute_error mean_squared_log_error mean_poisson_deviance mean_gamma_deviance
mean_pinball_loss hinge_loss hamming_loss zero_one_loss huber_loss sown_loss auxiliary_loss
negative_log_likelihood kl kl_divergence fid frechet_distance brier_score brier_score_loss ece calibration_error
wer cer ter word_error_rate character_error_rate equal_error_rate
"""
_MORE = """
accuracy balanced_accuracy top_accuracy auc auroc roc_auc roc_auc_score pr_auc auprc average_precision
average_precision_score precision recall sensitivity specificity f1 f1_score fbeta_score matthews_corrcoef mcc
cohen_kappa cohen_kappa_score r2 r2_score explained_variance d2_score log_likelihood elbo
mean_average_precision map ndcg mrr hit_rate iou mean_iou jaccard jaccard_score dice dice_score psnr ssim
inception_score bleu rouge meteor chrf return mean_return episode_return reward mean_reward episode_reward win_rate
pearson spearman correlation
"""
_KNOWN: dict[str, Direction] = {**dict.fromkeys(_LESS.split(), "min"), **dict.fromkeys(_MORE.split(), "max")}
_SPLIT = re.compile("^(train|validation|test|probe)_")
_NUMBER = re.compile(r"(?<=^top)_?\d+(?=_accuracy$)|@\d+$|_at_\d+$")


def direction_of(metric: str, stated: Mapping[str, Direction] | None = None) -> Direction | None:
    """Returns whether less (``"min"``) or more (``"max"``) of ``metric`` is better; None if it is not known.

    What is ``stated`` counts first, with the split in front of the name or without; then common names, as a whole:
    ``mae`` is known, and ``my_mae`` is not.

    >>> jn.tasks.direction_of("test_mae"), jn.tasks.direction_of("test_gain", {"gain": "max"})
    ('min', 'max')
    """
    stated, name = stated or {}, _SPLIT.sub("", metric)
    common = _NUMBER.sub("", name.rpartition("/")[2])  # of what a probe returns, without its name
    return stated.get(metric) or stated.get(name) or _KNOWN.get(common)


def check_direction(metric: str, direction: Direction | None, option: str) -> Direction:
    """Returns ``direction``; a ConfigError that names ``option``, which sets it, if it is None or none."""
    if direction in ("min", "max"):
        return direction
    wrong = f"is {direction!r}" if direction is not None else "is not known"
    raise ConfigError(
        f"whether less or more of {metric!r} is better {wrong}: set {option} to 'min' or 'max', or state it in the "
        f"task, as task._replace(directions={{{_SPLIT.sub('', metric)!r}: 'max'}})."
    )
