//go:build race

package tier

// underRace: times mean nothing.
const underRace = true
