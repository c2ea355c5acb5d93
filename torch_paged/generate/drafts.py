def draft_with(generator, drafts):
    pass
