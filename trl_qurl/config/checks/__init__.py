"""What the configurations refuse: nobody has to open this room to know the settings.

A refusal names what was given, says why it cannot work, and names the way out.
"""
