// Package fault marks places in the code at which tests provoke failures. In a normal build a mark
// costs nothing and does nothing; a build with the tag kvport_fault lets a test hook it.
package fault
