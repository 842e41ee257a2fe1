// Package placement plays the protocol of docs/spec/placement.md: readers and writers of a host, the lane of a plugin, its
// deaths and next lives, between which the host reads on, promotions, evictions, replacements, resets and lies.
//
// Both ends are the code of internal/place, as it is. Each actor is a coroutine that stops before every access of shared
// memory, so that a seed, or a search, decides who goes on. The bytes of a block are two tags that say what was written:
// a mixture of two blocks shows at once.
//
// A [Mutant] makes something between the ends wrong: it holds back, changes or forgets an access or a message. The
// simulation is worth something only as long as it notices every one of them.
package placement
