"""Counters of this package, beside those of the agent."""

from __future__ import annotations

from kvport_agent import stats

# All except kvport_shim_faults_total, whose label nobody knows before.
SHIM = {
    "kvport_shim_agents_lost_total": "Agents that ended while the engine ran.",
    "kvport_shim_load_by_layer_off_total": "Times that load_by_layer was switched off: a rank could not wait for layers.",
    "kvport_shim_loads_by_layer_total": "Loads of which a layer was used before their end.",
    "kvport_shim_loads_failed_total": "Loads of which the connector did not bring every block.",
    "kvport_shim_loads_in_step_total": "Loads that their step waited for.",
    "kvport_shim_lookups_given_up_total": "Lookups that had no answer in time and counted as misses.",
    "kvport_shim_lookups_ahead_total": "Lookups that came ahead with another one, in its call: vLLM had not asked yet.",
    "kvport_shim_lookups_total": "Lookups that vLLM asked for and that the agent was asked for in turn: a call each.",
}
FAULTS = "kvport_shim_faults_total"


class Counters(stats.Counters):
    """What is to be told to vLLM since the last time."""

    def __init__(self) -> None:
        """Begin with nothing."""
        super().__init__(SHIM, {FAULTS: "Exceptions that were caught in a hook: bugs of this package."})

    def agent_lost(self) -> None:
        """Note that the agent has ended."""
        super().agent_lost()
        self.add("kvport_shim_agents_lost_total")
