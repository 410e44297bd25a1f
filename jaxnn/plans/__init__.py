"""Plans: compile an experiment for a graphics card that is not here, and report what it needs and can reach."""

from jaxnn.plans._cards import CARDS, Card, card_here, find_card
from jaxnn.plans._step_plan import PlanOptions, StepPlan, plan, topology

__all__ = ["CARDS", "Card", "PlanOptions", "StepPlan", "find_card", "plan"]
