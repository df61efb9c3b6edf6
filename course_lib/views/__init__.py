"""Pictures, and controls around them, one file per topic. Only notebooks and tests import them."""

from course_lib.views.questions import predict, quiz

__all__ = ["predict", "quiz"]
