"""The task factory: releases of real packages become bug-fix and localisation tasks, by changes that their own tests notice."""
