// Package host is the engine's end of a connector plugin.
//
// A [Host] starts the plugin as a process of its own, watches it, restarts it when it dies, and
// turns the blocking contract of package connector into what an engine's loop needs: Match answers
// within 200 microseconds, Step never waits, and everything else arrives as an [Event]. It pins the
// blocks of every running call until nothing can touch them any more, gives each call a deadline,
// checks each answer against what was asked, and verifies the digest of every block that was
// loaded. Whatever a plugin does, each Transfer ends in exactly one event (rule HOST-01), so the
// worst that a broken plugin can cause is that the engine computes what it could have loaded.
//
// [Launch] and [Connect] are the parts below a Host: one plugin process, and the proxies that speak
// to a plugin over any connection.
package host
