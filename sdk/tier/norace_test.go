//go:build !race

package tier

const underRace = false
