"""From tokens to OpenAI answers, for every engine that speaks tokens."""

from pdhub.router.presentation.base import Envelope
from pdhub.router.presentation.options import Options
from pdhub.router.presentation.parsed import ParsedPresenter
from pdhub.router.presentation.presenter import Presenter
from pdhub.router.presentation.text import TextDecoder, load_text_decoder

__all__ = ["Envelope", "Options", "ParsedPresenter", "Presenter", "TextDecoder", "load_text_decoder"]
