// Package plugin is the process plane of a host: it finds a connector's plugin, starts its process, watches it, reaps
// it with all that it has started, and speaks to it. A [Process] is one life of a plugin and is not restarted; a
// [Remote] is a plugin at the other end of any connection. What a life is for, and what comes after it, is the host's.
package plugin
