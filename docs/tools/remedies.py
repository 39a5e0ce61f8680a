"""What each error stands for and what helps, for the page of the errors."""

REMEDIES = {
    "StratagemError": (
        "The base of every error that Stratagem raises on purpose.",
        "Catch it to catch them all.",
    ),
    "ConfigurationError": (
        "The arguments cannot be combined, or the machine does not have what they ask for.",
        "Change the argument that the message names. `stratagem explain` shows what was chosen "
        "and why.",
    ),
    "UnknownNameError": (
        "No installed distribution has a component of that name.",
        "Check the spelling with `stratagem strategies --all`. The message names the closest "
        "names, and the distribution to install.",
    ),
    "AmbiguousNameError": (
        "Two installed distributions have a component of that name.",
        "Write the name with its distribution, as the message shows.",
    ),
    "MissingPackageError": (
        "The request needs a package that is not installed.",
        "Run the `pip install` command in the message.",
    ),
    "PluginError": (
        "A plugin, or a component of one, does not keep its contract.",
        "Report it to the author of the plugin. `STRATAGEM_DISABLE_PLUGINS` switches a plugin off.",
    ),
    "UserCodeError": (
        "A `Module`, a loader or a callback does not keep its contract.",
        "Change the method that the message names.",
    ),
    "NonFiniteLossError": (
        "The loss is NaN or infinite, and `detect_anomaly=True`.",
        "Look at the batch that the message names. Lower the learning rate, or clip gradients.",
    ),
    "CheckpointError": (
        "The base of all errors about checkpoints.",
        "See the classes below it.",
    ),
    "CheckpointNotFoundError": (
        "No checkpoint is at that path.",
        "Choose one of the checkpoints that the message lists.",
    ),
    "CheckpointCorruptError": (
        "The file is cut short or damaged, or loading it would have to execute code.",
        "Run `stratagem checkpoint verify` on it and its neighbours, and resume from a sound one.",
    ),
    "CheckpointFormatError": (
        "The file is a checkpoint of another format.",
        "Load it with the format that the message names, or convert it with "
        "`stratagem checkpoint convert`.",
    ),
    "CheckpointSaveError": (
        "The file system refused to write: no space, no permission, or a failing disk.",
        "Free space or choose another folder. The previous checkpoint is still whole.",
    ),
    "CheckpointMismatchError": (
        "The checkpoint belongs to a model with other weights, or to another optimizer.",
        "Compare the names in the message with your model. `strict=False` loads the names that "
        "match; another shape is an error in any case.",
    ),
    "CheckpointContentError": (
        "A value to be saved is not weights-only-safe data, so that loading it would execute code.",
        "Convert the value that the message names to tensors, numbers, strings, lists or dicts.",
    ),
    "RankFailedError": (
        "Another rank ended with an error.",
        "Read the traceback of that rank in the message. It is the cause.",
    ),
    "CommunicationError": (
        "A collective failed, because a rank is missing or calls something else.",
        "The message says where each rank is. Look for a branch that only some ranks take.",
    ),
    "DivergenceError": (
        "Ranks that must be equal differ, and `detect_divergence` is on.",
        "The message names the parameter and the ranks. Look for a seed or a change of weights "
        "that only some ranks have.",
    ),
}
