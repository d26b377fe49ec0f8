"""What all tests have in common."""

from hypothesis import settings

settings.register_profile("regrow", deadline=None)  # a busy machine is no failure
settings.load_profile("regrow")
