def doctor(): pass
