"""Triton's interpreter at a bearable speed, for processes in which nothing else uses triton."""


def quicken():
    """Leaves triton.language patched once it is patched, instead of anew for every call of a device function, and does
    without checks of every integer addition. Both are details of the interpreter: without them tests are only slow."""
    try:
        from triton.runtime import interpreter

        patch, options = interpreter._patch_lang, interpreter.interpreter_builder.options
    except (ImportError, AttributeError):
        return
    if getattr(patch, "quick", False):
        return
    patched = set()

    class Kept:
        def restore(self):
            pass

    def patch_once(function):
        key = id(function.__globals__)
        if key not in patched:
            patched.add(key)
            patch(function)
        return Kept()

    patch_once.quick = True
    interpreter._patch_lang = patch_once
    object.__setattr__(options, "sanitize_overflow", False)
