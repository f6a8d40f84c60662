"""Does what was written compute what was factorized?"""
