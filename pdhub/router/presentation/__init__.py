"""From tokens to OpenAI answers, for every engine that speaks tokens."""

from pdhub.router.presentation.options import Options
from pdhub.router.presentation.presenter import Presenter
from pdhub.router.presentation.text import TextDecoder, load_text_decoder

__all__ = ["Options", "Presenter", "TextDecoder", "load_text_decoder"]
