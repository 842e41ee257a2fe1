// Package simulate plays whole deployments from a seed: engines with their schedulers, caches and
// the tracker of hosts, plugins, a store, a router and clients, in one loop with virtual time and
// without goroutines.
//
// The parts that decide are the real ones: engine/sched, engine/kvcache, internal/tracker,
// internal/ticket and the router's choice of instances. The parts around them are models: the
// model's KV is a tag in each slot that says which prefix the slot is the KV of, so that attention
// to a wrong, stale or torn block shows at once; a plugin is a process that does its work piece by
// piece, in any order, and may crash, hang, lie or be slow at every message.
//
// A run is a function of its [Options] and its script, a list of [Op]. Each Op carries its own seed, so
// that taking one out of a script leaves the others as they are: this is how a failing seed is
// minimised. After every step the invariants (a) to (i) are checked; see [Violation].
//
// A [Mutant] makes the layer between the real parts wrong in a way that was once an incident in a
// serving system. The simulation is worth something only as long as it notices every one of them.
package simulate
