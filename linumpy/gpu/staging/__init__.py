"""Memory that stored bytes pass through, engines that read them, and the scatter into outputs."""
