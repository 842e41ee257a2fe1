// Package fleet plays a router in front of up to 1,000 instances from a seed, in virtual time: a trace of conversations,
// prefix caches that evict, KV events that come late or not at all, registrations, health checks, and racks that fail.
//
// What decides is the router's own code: [router.Core] with its instances, registrations, policies and index, and
// [kvevents.Order], which notices what is missing among events. The instances are models: a queue for prompts, a cache of
// blocks, and times that are proportional to tokens.
//
// A run is a function of its [Options], except for what is measured by the clock that they have. When it comes to rest its
// invariants are checked: the index has what the caches have, nothing is counted that does not run, and no request went to
// an instance that had long been down. A [Mutant] makes something between the router and the instances wrong. The simulation
// is worth something only as long as it notices every one of them.
package fleet
